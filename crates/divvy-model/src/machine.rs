//! The machine description: which nodes a simulated cluster has, and which GPUs they have. One format for
//! `divvy demo --nodes` and for the simulated NVML library (DESIGN.md section 15).

use serde::Deserialize;

use crate::Error;

/// A whole description.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machines {
    /// Format version, 1.
    pub v: u32,
    /// The nodes, in order.
    #[serde(default, rename = "node")]
    pub nodes: Vec<MachineNode>,
}

/// One node.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineNode {
    /// The node's name.
    pub name: String,
    /// Its InternalIP; made up when absent.
    #[serde(default)]
    pub address: Option<String>,
    /// Driver version; `550.54.15` when absent.
    #[serde(default = "default_driver")]
    pub driver: String,
    /// CPU cores that pods can ask for.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// Main memory that pods can ask for, in MiB.
    #[serde(default = "default_memory")]
    pub memory_mib: u64,
    /// Its GPUs, in PCI order; none is a node without GPUs.
    #[serde(default, rename = "gpu")]
    pub gpus: Vec<MachineGpu>,
}

/// One GPU. What is absent gets the value of a healthy idle card.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineGpu {
    /// Product name.
    pub model: String,
    /// Made from node and index when absent, the same at every reading.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Memory in all, in MiB.
    pub memory_mib: u64,
    /// Minor number; the index when absent.
    #[serde(default)]
    pub minor: Option<u32>,
    /// PCI bus id `0000:81:00.0`; made from the index when absent.
    #[serde(default)]
    pub pci: Option<String>,
    /// Compute capability; `8.0` when absent.
    #[serde(default = "default_cc")]
    pub cc: String,
    /// Streaming multiprocessors.
    #[serde(default = "default_sms")]
    pub sms: u32,
    /// Highest SM clock in MHz.
    #[serde(default = "default_clock")]
    pub clock_mhz: u32,
    /// Highest memory clock in MHz; when absent the driver does not say it.
    #[serde(default)]
    pub memory_clock_mhz: Option<u32>,
    /// Width of the memory bus in bits; when absent the driver does not say it, as before version 495.
    #[serde(default)]
    pub memory_bus_bits: Option<u32>,
    /// NUMA node; none when absent.
    #[serde(default)]
    pub numa: Option<u32>,
    /// Temperature in °C.
    #[serde(default = "default_temperature")]
    pub temperature: u32,
    /// Utilisation in percent.
    #[serde(default)]
    pub utilization: u32,
    /// Connections: `[index of the other GPU, kind, count]` with the kinds of [`crate::Link`].
    #[serde(default)]
    pub links: Vec<(u32, String, u32)>,
    /// Processes on it.
    #[serde(default)]
    pub processes: Vec<MachineProcess>,
    /// MIG devices into which it is divided, in NVML's order. Absent: MIG is not to be had; empty: it is on, and nothing can run on the GPU.
    #[serde(default)]
    pub mig: Option<Vec<MachineMig>>,
}

/// A MIG device.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineMig {
    /// Number of its GPU instance.
    pub gpu_instance: u32,
    /// Number of its compute instance.
    pub compute_instance: u32,
}

/// A process on a GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineProcess {
    /// Process number on the host.
    pub pid: u32,
    /// Memory used, in MiB.
    pub used_mib: u64,
}

fn default_driver() -> String {
    "550.54.15".to_owned()
}
fn default_cpus() -> u32 {
    16
}
fn default_memory() -> u64 {
    65536
}
fn default_cc() -> String {
    "8.0".to_owned()
}
fn default_sms() -> u32 {
    108
}
fn default_clock() -> u32 {
    1410
}
fn default_temperature() -> u32 {
    35
}

impl Machines {
    /// Reads a description; says line and column of what is wrong.
    pub fn parse(text: &str) -> Result<Machines, Error> {
        const WHAT: &str = "machine description";
        let machines: Machines = toml::from_str(text).map_err(|error| Error::invalid(WHAT, error.to_string()))?;
        if machines.v != 1 {
            return Err(Error::Version {
                what: WHAT,
                found: machines.v.to_string(),
            });
        }
        let mut uuids = std::collections::BTreeSet::new();
        for (i, node) in machines.nodes.iter().enumerate() {
            let label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
            if node.name.is_empty() || node.name.len() > 63 || !node.name.chars().all(label) {
                return Err(Error::invalid(
                    WHAT,
                    format!(
                        "node {i} is named {:?}; a node's name is lower-case letters, digits, '-' and '.'",
                        node.name
                    ),
                ));
            }
            if machines.nodes[..i].iter().any(|other| other.name == node.name) {
                return Err(Error::invalid(WHAT, format!("two nodes are named {}", node.name)));
            }
            for index in 0..node.gpus.len() {
                let uuid = node.gpu_uuid(index);
                if !uuids.insert(uuid.clone()) {
                    return Err(Error::invalid(WHAT, format!("two GPUs have the UUID {uuid}")));
                }
            }
            for gpu in &node.gpus {
                if let Some((other, ..)) = gpu.links.iter().find(|(other, ..)| *other as usize >= node.gpus.len()) {
                    return Err(Error::invalid(
                        WHAT,
                        format!("node {} has a link to GPU {other}, and {} GPUs", node.name, node.gpus.len()),
                    ));
                }
            }
        }
        Ok(machines)
    }

    /// The node of this name.
    pub fn node(&self, name: &str) -> Option<&MachineNode> {
        self.nodes.iter().find(|node| node.name == name)
    }
}

impl MachineNode {
    /// UUID of the GPU at this index: as given, or made from the node's name and the index.
    pub fn gpu_uuid(&self, index: usize) -> String {
        if let Some(uuid) = self.gpus.get(index).and_then(|gpu| gpu.uuid.clone()) {
            return uuid;
        }
        self.made_uuid("GPU", &index.to_string())
    }

    /// UUID of a GPU's MIG device: made from the node's name and both indices.
    pub fn mig_uuid(&self, gpu: usize, mig: usize) -> String {
        self.made_uuid("MIG", &format!("{gpu}:{mig}"))
    }

    fn made_uuid(&self, kind: &str, of: &str) -> String {
        let digest = crate::grant::cdi_device_name(b"machine description", &self.name, [of]);
        format!(
            "{kind}-{}-{}-4{}-8{}-{}",
            &digest[..8],
            &digest[8..12],
            &digest[13..16],
            &digest[17..20],
            &digest[20..32]
        )
    }

    /// Minor number of the GPU at this index.
    pub fn gpu_minor(&self, index: usize) -> u32 {
        let own = u32::try_from(index).unwrap_or(u32::MAX);
        self.gpus.get(index).and_then(|gpu| gpu.minor).unwrap_or(own)
    }

    /// PCI bus id of the GPU at this index, `0000:81:00.0`.
    pub fn gpu_pci(&self, index: usize) -> String {
        let made = || format!("0000:{:02x}:00.0", (0x80 + index) & 0xff);
        self.gpus.get(index).and_then(|gpu| gpu.pci.clone()).unwrap_or_else(made)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = r#"
v = 1
[[node]]
name = "archlinux"
address = "192.168.8.100"
[[node.gpu]]
model = "NVIDIA GeForce RTX 3080 Ti Laptop GPU"
memory_mib = 16384
processes = [{ pid = 1, used_mib = 10 }]
"#;

    #[test]
    fn what_is_absent_is_a_healthy_card_with_a_stable_uuid() {
        let machines = Machines::parse(TEXT).expect("description");
        let node = machines.node("archlinux").expect("node");
        assert_eq!(node.gpu_uuid(0), Machines::parse(TEXT).expect("again").nodes[0].gpu_uuid(0));
        assert_eq!(node.gpu_uuid(0).len(), 40);
        assert_eq!(
            (node.gpu_minor(0), node.gpu_pci(0).as_str(), node.driver.as_str()),
            (0, "0000:80:00.0", "550.54.15")
        );
    }

    #[test]
    fn no_two_devices_have_one_uuid() {
        let machines = Machines::parse(TEXT).expect("description");
        let node = &machines.nodes[0];
        let migs = (0..3).flat_map(|gpu| (0..3).map(move |mig| node.mig_uuid(gpu, mig)));
        let all: Vec<String> = (0..3).map(|gpu| node.gpu_uuid(gpu)).chain(migs).collect();
        let digits: std::collections::BTreeSet<&str> = all.iter().map(|uuid| &uuid[4..]).collect();
        assert_eq!(digits.len(), all.len(), "{all:?}");
    }

    #[test]
    fn a_wrong_description_is_refused_with_its_place() {
        for (text, part) in [
            ("v = 2", "version 2"),
            ("v = 1\nx = 1", "unknown field `x`"),
            ("v = 1\n[[node]]\nname = \"A b\"", "lower-case"),
            (
                "v = 1\n[[node]]\nname = \"a\"\n[[node]]\nname = \"a\"",
                "two nodes are named a",
            ),
            ("v = 1\n[[node]]\nname = \"a\"\n[[node.gpu]]\nmodel = \"m\"\n", "memory_mib"),
            (
                "v = 1\n[[node]]\nname = \"a\"\n[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 1\nlinks = [[3, \"nvlink\", 1]]",
                "link to GPU 3",
            ),
        ] {
            let error = Machines::parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
