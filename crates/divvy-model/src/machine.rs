//! The machine description: a TOML file that lists the nodes of a simulated cluster and their GPUs. `divvy demo --nodes`
//! and the simulated NVML library read the same format.

use serde::{Deserialize, Serialize};

use crate::{Error, LinkKind};

/// A parsed machine description.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Machines {
    /// The format version, 1.
    pub v: u32,
    /// The nodes, in the order of the file.
    #[serde(default, rename = "node")]
    pub nodes: Vec<MachineNode>,
}

/// One simulated node.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineNode {
    /// The node's name.
    pub name: String,
    /// The node's InternalIP. If absent, it is generated.
    #[serde(default)]
    pub address: Option<String>,
    /// Driver version; `550.54.15` if absent.
    #[serde(default = "default_driver")]
    pub driver: String,
    /// CPU cores that pods can request; 16 if absent.
    #[serde(default = "default_cpus")]
    pub cpus: u32,
    /// Main memory that pods can request, in MiB; 65536 if absent.
    #[serde(default = "default_memory")]
    pub memory_mib: u64,
    /// The node's NVIDIA GPUs, in PCI order; may be empty.
    #[serde(default, rename = "gpu")]
    pub gpus: Vec<MachineGpu>,
    /// The node's AMD GPUs, in PCI order; may be empty.
    #[serde(default)]
    pub amd: Vec<MachineAmd>,
    /// The node's Intel GPUs, in PCI order; may be empty.
    #[serde(default)]
    pub intel: Vec<MachineIntel>,
}

/// One simulated Intel GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineIntel {
    /// The PCI device id, such as `0xe20b`.
    pub device: String,
    /// Total memory in MiB. A GPU with several tiles has this much in all.
    pub memory_mib: u64,
    /// The number of tiles, between which the memory is divided equally; 1 if absent.
    #[serde(default = "default_tiles")]
    pub tiles: u32,
    /// NUMA node; unknown if absent.
    #[serde(default)]
    pub numa: Option<u32>,
}

/// One simulated AMD GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineAmd {
    /// Product name, such as `AMD Instinct MI210`.
    pub model: String,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// The number of the GPU's hive. The GPUs of one hive are connected by XGMI.
    #[serde(default)]
    pub hive: u64,
    /// NUMA node; unknown if absent.
    #[serde(default)]
    pub numa: Option<u32>,
}

/// One simulated NVIDIA GPU. Absent fields get the values of a healthy, idle GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineGpu {
    /// Product name, such as `NVIDIA A100-SXM4-40GB`.
    pub model: String,
    /// UUID. If absent, it is derived from the node's name and the GPU's index, so that the UUID is the same each time the file
    /// is read.
    #[serde(default)]
    pub uuid: Option<String>,
    /// Total memory in MiB.
    pub memory_mib: u64,
    /// Memory in MiB that a CUDA context takes. If absent, the simulated CUDA driver has a default.
    #[serde(default)]
    pub context_mib: Option<u64>,
    /// Minor number; the index if absent.
    #[serde(default)]
    pub minor: Option<u32>,
    /// PCI bus id, such as `0000:81:00.0`; derived from the index if absent.
    #[serde(default)]
    pub pci: Option<String>,
    /// CUDA compute capability; `8.0` if absent.
    #[serde(default = "default_cc")]
    pub cc: String,
    /// Number of streaming multiprocessors; 108 if absent.
    #[serde(default = "default_sms")]
    pub sms: u32,
    /// Highest SM clock in MHz; 1410 if absent.
    #[serde(default = "default_clock")]
    pub clock_mhz: u32,
    /// Highest memory clock in MHz. If absent, the simulated driver does not report it.
    #[serde(default)]
    pub memory_clock_mhz: Option<u32>,
    /// Width of the memory bus in bits. If absent, the simulated driver does not report it, as is the case with drivers before
    /// version 495.
    #[serde(default)]
    pub memory_bus_bits: Option<u32>,
    /// NUMA node; unknown if absent.
    #[serde(default)]
    pub numa: Option<u32>,
    /// Temperature in °C; 35 if absent.
    #[serde(default = "default_temperature")]
    pub temperature: u32,
    /// Utilization in percent; 0 if absent.
    #[serde(default)]
    pub utilization: u32,
    /// Connections to other GPUs: `[index of the other GPU, kind, number of NVLinks]`, with the texts of [`LinkKind`].
    #[serde(default)]
    pub links: Vec<(u32, LinkKind, u32)>,
    /// The time between two samples of the processes' utilization, in ms; 167 if absent.
    #[serde(default = "default_sample")]
    pub sample_ms: u64,
    /// Processes that use the GPU.
    #[serde(default)]
    pub processes: Vec<MachineProcess>,
    /// The MIG devices into which the GPU is divided, in NVML's order. If absent, MIG is not enabled. If empty, MIG is enabled
    /// but there are no MIG devices, so nothing can run on the GPU.
    #[serde(default)]
    pub mig: Option<Vec<MachineMig>>,
    /// Whether the GPU supports MIG. A GPU with `mig` always does.
    #[serde(default)]
    pub mig_capable: bool,
    /// The GPU's place in an NVLink fabric. If absent, the GPU does not support fabrics.
    #[serde(default)]
    pub fabric: Option<MachineFabric>,
    /// What the driver counts and reports about the GPU's health.
    #[serde(default)]
    pub health: MachineHealth,
}

/// What the driver counts and reports about the health of a simulated GPU. What is absent, the GPU does not support.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MachineHealth {
    /// The errors of the memory that ECC found: those that it corrected, and the others.
    pub ecc_errors: Option<(u64, u64)>,
    /// The rows of the memory that were replaced by spare ones. A GPU before Ampere does not support it, whatever this says.
    pub remapped_rows: Option<MachineRows>,
    /// Whether pages of the memory are retired at the next reset.
    pub retired_pages_pending: Option<bool>,
    /// Why the clocks are lower than possible, as bits (`nvmlClocksEventReason…`).
    pub clocks_event_reasons: Option<u64>,
}

/// Rows of a simulated GPU's memory that were replaced by spare ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct MachineRows {
    /// How many because of errors that were corrected.
    pub correctable: u32,
    /// How many because of errors that were not.
    pub uncorrectable: u32,
    /// Whether rows are replaced at the next reset.
    pub pending: bool,
    /// Whether a row could not be replaced.
    pub failure: bool,
}

/// The place of a simulated GPU in an NVLink fabric, which connects GPUs of several nodes.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineFabric {
    /// UUID of the cluster.
    pub cluster: String,
    /// ID of the clique, which is a set of GPUs that can reach each other's memory.
    #[serde(default)]
    pub clique: u32,
    /// State of the registration (`NVML_GPU_FABRIC_STATE_…`). If absent, it is 3 (completed).
    #[serde(default = "default_fabric_state")]
    pub state: u8,
}

/// One simulated MIG device.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineMig {
    /// ID of the GPU instance.
    pub gpu_instance: u32,
    /// ID of the compute instance within the GPU instance.
    pub compute_instance: u32,
    /// Profile of the GPU instance (`NVML_GPU_INSTANCE_PROFILE_…`). If it is given, the compute instance has all slices of the
    /// GPU instance. If it is absent, the compute instance has one slice, and the GPU instance has the smallest profile with
    /// enough slices for its compute instances.
    #[serde(default)]
    pub profile: Option<u32>,
    /// UUID. If absent, it is derived from the node's name and the indices.
    #[serde(default)]
    pub uuid: Option<String>,
}

/// A process that uses a simulated GPU.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MachineProcess {
    /// PID on the host.
    pub pid: u32,
    /// GPU memory that the process uses, in MiB.
    pub used_mib: u64,
    /// How much of the time the GPU is busy with the process, in percent; 0 if absent.
    #[serde(default)]
    pub utilization: u32,
}

fn default_tiles() -> u32 {
    1
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
fn default_fabric_state() -> u8 {
    3
}
fn default_sample() -> u64 {
    167
}

impl Machines {
    /// Parse a description. An error names the line and column of the first mistake, or the node that is wrong.
    pub fn parse(text: &str) -> Result<Machines, Error> {
        const WHAT: &str = "machine description";
        let machines: Machines = toml::from_str(text).map_err(|error| Error::invalid(WHAT, error.to_string()))?;
        if machines.v != 1 {
            return Err(Error::Version {
                what: WHAT,
                found: machines.v.to_string(),
                newest: 1,
            });
        }
        let mut uuids = std::collections::BTreeSet::new();
        for (i, node) in machines.nodes.iter().enumerate() {
            let label = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
            if node.name.is_empty() || node.name.len() > 63 || !node.name.chars().all(label) {
                return Err(Error::invalid(
                    WHAT,
                    format!(
                        "node {i} is named {:?}; write a name of lower-case letters, digits, '-' and '.'",
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
                if gpu.sample_ms == 0 {
                    return Err(Error::invalid(
                        WHAT,
                        format!("a GPU of node {} takes samples each 0 ms; sample_ms is at least 1", node.name),
                    ));
                }
                if let Some((other, ..)) = gpu.links.iter().find(|(other, ..)| *other as usize >= node.gpus.len()) {
                    return Err(Error::invalid(
                        WHAT,
                        format!(
                            "node {} has a link to GPU {other}, but only {} GPUs",
                            node.name,
                            node.gpus.len()
                        ),
                    ));
                }
            }
        }
        Ok(machines)
    }

    /// Return the node with this name.
    pub fn node(&self, name: &str) -> Option<&MachineNode> {
        self.nodes.iter().find(|node| node.name == name)
    }
}

impl MachineNode {
    /// Report whether the node has a GPU of any vendor.
    pub fn has_gpus(&self) -> bool {
        !self.gpus.is_empty() || !self.amd.is_empty() || !self.intel.is_empty()
    }

    /// Return the UUID of the GPU at this index: the given one, or one derived from the node's name and the index.
    pub fn gpu_uuid(&self, index: usize) -> String {
        if let Some(uuid) = self.gpus.get(index).and_then(|gpu| gpu.uuid.clone()) {
            return uuid;
        }
        self.made_uuid("GPU", &index.to_string())
    }

    /// Return the UUID of a GPU's MIG device: the given one, or one derived from the node's name and both indices.
    pub fn mig_uuid(&self, gpu: usize, mig: usize) -> String {
        let described = self.gpus.get(gpu).and_then(|gpu| gpu.mig.as_ref()?.get(mig));
        if let Some(uuid) = described.and_then(|mig| mig.uuid.clone()) {
            return uuid;
        }
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

    /// Return the minor number of the GPU at this index.
    pub fn gpu_minor(&self, index: usize) -> u32 {
        let own = u32::try_from(index).unwrap_or(u32::MAX);
        self.gpus.get(index).and_then(|gpu| gpu.minor).unwrap_or(own)
    }

    /// Return the PCI bus id of the GPU at this index, such as `0000:81:00.0`.
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
    fn a_node_may_have_gpus_of_all_vendors() {
        let text = format!(
            "{TEXT}[[node.amd]]\nmodel = \"AMD Instinct MI210\"\nmemory_mib = 65520\n[[node.intel]]\ndevice = \"0xe20b\"\nmemory_mib = 12216\n"
        );
        let machines = Machines::parse(&text).expect("description");
        let node = &machines.nodes[0];
        assert_eq!((node.gpus.len(), node.amd.len(), node.intel.len()), (1, 1, 1));
        assert_eq!((node.intel[0].tiles, node.intel[0].numa), (1, None));
        let only = format!(
            "v = 1\n[[node]]\nname = \"a\"\n{}",
            &text[text.find("[[node.intel]]").expect("there")..]
        );
        assert!(Machines::parse(&only).expect("description").nodes[0].has_gpus());
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
            (
                "v = 1\n[[node]]\nname = \"a\"\n[[node.gpu]]\nmodel = \"m\"\nmemory_mib = 1\nsample_ms = 0",
                "sample_ms is at least 1",
            ),
        ] {
            let error = Machines::parse(text).expect_err(text).to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
