use crate::{Error, Inventory};

/// The few fields of a node that Divvy reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// metadata.uid
    pub uid: String,
    /// metadata.name
    pub name: String,
    /// First InternalIP.
    pub address: Option<String>,
    /// status.capacity of gpu-mem, in units; 0 when absent.
    pub capacity_units: u64,
    /// status.capacity of gpu-count; 0 when absent.
    pub capacity_gpus: u64,
    /// status.capacity of [`crate::names::WHOLE_GPU`], which is another plugin's; 0 when absent.
    pub whole_gpus: u64,
    /// status.nodeInfo.containerRuntimeVersion, `containerd://2.1.4`.
    pub runtime: Option<String>,
    /// status.allocatable of gpu-mem, in units: without the units of failed GPUs.
    pub allocatable_units: u64,
    /// status.allocatable of gpu-count.
    pub allocatable_gpus: u64,
    /// status.allocatable of CPU, in thousandths of a core.
    pub cpu_milli: u64,
    /// status.allocatable of main memory, in bytes.
    pub memory_bytes: u64,
    /// status.allocatable of pods.
    pub pods: u64,
    /// spec.unschedulable (cordoned).
    pub unschedulable: bool,
    /// Annotation `divvy.dev/inventory`; `None` when absent.
    pub inventory: Option<Result<Inventory, Error>>,
}
