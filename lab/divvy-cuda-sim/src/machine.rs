//! The described machine in CUDA's terms.

use std::env;
use std::path::PathBuf;

use divvy_gpu_sim::{cuda_version, parse_version};
use divvy_model::machine::{MachineGpu, Machines};

/// What a context takes if the description does not say: the order of magnitude of a data center GPU.
const CONTEXT_MIB: u64 = 300;

/// The node of the description that this process runs on.
#[derive(Debug)]
pub(crate) struct Machine {
    pub(crate) version: i32,
    pub(crate) cards: Vec<Card>,
}

/// One GPU.
#[derive(Debug)]
pub(crate) struct Card {
    pub(crate) uuid: String,
    /// The PCI bus id, such as `0000:81:00.0`.
    pub(crate) pci: String,
    pub(crate) described: MachineGpu,
    /// The memory that the processes of the ledger can have, in bytes: all but that of the described processes.
    pub(crate) capacity: u64,
    /// The memory that a context takes, in bytes.
    pub(crate) context: u64,
}

impl Card {
    /// Return the compute capability: 86 for 8.6.
    pub(crate) fn capability(&self) -> u32 {
        let (major, minor) = self.described.cc.split_once('.').unwrap_or_default();
        let number = |text: &str| text.parse().unwrap_or(0);
        10 * number(major) + number(minor)
    }
}

impl Machine {
    /// Read what the environment describes.
    pub(crate) fn load() -> Result<Machine, String> {
        let path =
            env::var_os("DIVVY_NVML_SIM").ok_or("DIVVY_NVML_SIM is not set; set it to the path of the machine description")?;
        let path = PathBuf::from(path);
        let text = std::fs::read_to_string(&path).map_err(|error| format!("{}: {error}", path.display()))?;
        let machines = Machines::parse(&text).map_err(|error| format!("{}: {error}", path.display()))?;
        let node = match env::var("DIVVY_NVML_SIM_NODE") {
            Ok(name) => machines.node(&name),
            Err(_) => machines.nodes.first(),
        };
        let node = node.ok_or_else(|| format!("{}: the node of DIVVY_NVML_SIM_NODE is not described", path.display()))?;
        let card = |(index, described): (usize, &MachineGpu)| {
            let others: u64 = described.processes.iter().map(|process| process.used_mib).sum();
            Card {
                uuid: node.gpu_uuid(index),
                pci: node.gpu_pci(index),
                described: described.clone(),
                capacity: mib(described.memory_mib.saturating_sub(others)),
                context: mib(described.context_mib.unwrap_or(CONTEXT_MIB)),
            }
        };
        let version = match env::var("DIVVY_CUDA_SIM_VERSION") {
            Ok(text) => {
                parse_version(&text).ok_or_else(|| format!("DIVVY_CUDA_SIM_VERSION is {text:?}; write it like \"12.4\""))?
            }
            Err(_) => cuda_version(&node.driver),
        };
        Ok(Machine {
            version,
            cards: node.gpus.iter().enumerate().map(card).collect(),
        })
    }
}

fn mib(count: u64) -> u64 {
    count.saturating_mul(1 << 20)
}

/// Return the 16 bytes of a UUID such as `GPU-8f0a…`. A UUID that is not one, as a description may have it, has bytes that differ as it does.
pub(crate) fn uuid_bytes(text: &str) -> [u8; 16] {
    let digits: String = text.chars().skip(4).filter(|c| *c != '-').collect();
    match u128::from_str_radix(&digits, 16) {
        Ok(number) if digits.len() == 32 => number.to_be_bytes(),
        _ => {
            // FNV-1a, so that two made-up names have different bytes.
            let fold = |hash: u128, byte: u8| (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b);
            text.bytes()
                .fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, fold)
                .to_be_bytes()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn different_uuids_have_different_bytes() {
        let real = uuid_bytes("GPU-00010203-0405-4607-8809-0a0b0c0d0e0f");
        assert_eq!(real, [0, 1, 2, 3, 4, 5, 0x46, 7, 0x88, 9, 10, 11, 12, 13, 14, 15]);
        assert_ne!(uuid_bytes("GPU-1"), uuid_bytes("GPU-2"));
        assert_ne!(uuid_bytes(""), uuid_bytes("é"));
    }
}
