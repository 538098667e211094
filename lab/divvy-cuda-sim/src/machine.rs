//! The described machine in CUDA's terms.

use std::env;

use divvy_gpu_sim::description::{self, BadGpu, DescriptionError};
use divvy_gpu_sim::mig::{Profile, SMS_OF_SLICE};
use divvy_gpu_sim::{cuda_version, parse_version};
use divvy_model::machine::{MachineGpu, MachineMig, MachineNode};
use divvy_model::{MiB, MigParts};

use crate::card::CudaCard;
use crate::visible::{VisibleGpu, visible};

/// What a context takes if the description does not say: the order of magnitude of a data center GPU.
const CONTEXT_MIB: u64 = 300;

/// The node of the description that this process runs on.
#[derive(Debug)]
pub(crate) struct CudaMachine {
    pub(crate) version: i32,
    /// What this process can use.
    pub(crate) cards: Vec<CudaCard>,
}

impl CudaMachine {
    /// Read what the environment describes.
    pub(crate) fn load() -> Result<CudaMachine, DescriptionError> {
        let node = node()?;
        let version = version_of(&node)?;
        let gpus: Vec<VisibleGpu> = (0..node.gpus.len())
            .map(|index| gpu(&node, index))
            .collect::<Result<_, _>>()?;
        // What is not UTF-8 names no GPU.
        let wanted = env::var_os("CUDA_VISIBLE_DEVICES").map(|list| list.to_string_lossy().into_owned());
        Ok(CudaMachine {
            version,
            cards: visible(&gpus, wanted.as_deref()),
        })
    }
}

/// Return the CUDA version of the described driver.
pub(crate) fn version() -> Result<i32, DescriptionError> {
    version_of(&node()?)
}

fn version_of(node: &MachineNode) -> Result<i32, DescriptionError> {
    match env::var("DIVVY_CUDA_SIM_VERSION") {
        Ok(text) => parse_version(&text).ok_or(DescriptionError::CudaVersion(text)),
        Err(_) => Ok(cuda_version(&node.driver)),
    }
}

/// Return the description of this process's node.
fn node() -> Result<MachineNode, DescriptionError> {
    description::read(&description::path()?, description::node_name().as_deref())
}

/// Return a GPU, or what it is divided into.
fn gpu(node: &MachineNode, index: usize) -> Result<VisibleGpu, DescriptionError> {
    let (uuid, described) = (node.gpu_uuid(index), &node.gpus[index]);
    let card = |uuid: &str, ledger: String, described: MachineGpu| {
        let others: u64 = described.processes.iter().map(|process| process.used_mib).sum();
        CudaCard {
            uuid: uuid.to_owned(),
            gpu_uuid: node.gpu_uuid(index),
            ledger,
            pci: node.gpu_pci(index),
            capacity: mib(described.memory_mib.saturating_sub(others)),
            context: mib(described.context_mib.unwrap_or(CONTEXT_MIB)),
            described,
        }
    };
    let cards = match &described.mig {
        None => vec![card(&uuid, uuid.clone(), described.clone())],
        Some(parts) => {
            let one = |(at, part): (usize, &MachineMig)| {
                let first = parts.iter().position(|other| other.gpu_instance == part.gpu_instance);
                let ledger = node.mig_uuid(index, first.unwrap_or(at));
                let described = divided(described, parts, part).ok_or_else(|| DescriptionError::Gpu {
                    node: node.name.clone(),
                    index,
                    what: BadGpu::MigProfile(at),
                })?;
                Ok(card(&node.mig_uuid(index, at), ledger, described))
            };
            parts.iter().enumerate().map(one).collect::<Result<_, _>>()?
        }
    };
    Ok(VisibleGpu {
        uuid,
        is_divided: described.mig.is_some(),
        cards,
    })
}

/// Describe a MIG device as a GPU: with its own name, memory, and multiprocessors. `None` for an unknown profile.
fn divided(gpu: &MachineGpu, parts: &[MachineMig], part: &MachineMig) -> Option<MachineGpu> {
    let within = || parts.iter().filter(|other| other.gpu_instance == part.gpu_instance);
    let named = within().find_map(|other| other.profile);
    let profile = Profile::of(named, within().count())?;
    let compute_slices = profile.compute_slices(named);
    let parts = MigParts {
        gi_profile: Some(profile.number),
        gi_slices: profile.slices,
        ci_slices: compute_slices,
        memory: profile.memory_mib(gpu.memory_mib),
        ..MigParts::default()
    };
    Some(MachineGpu {
        model: format!("{} MIG {}", gpu.model, parts.profile(MiB(gpu.memory_mib))),
        memory_mib: parts.memory,
        sms: SMS_OF_SLICE * compute_slices,
        // The description does not say which MIG device a process uses.
        processes: Vec::new(),
        ..gpu.clone()
    })
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
