use std::collections::BTreeMap;

use crate::out_of_service::GpusOutOfService;
use crate::{Error, Inventory, WholeKind};

/// The fields of a Kubernetes node that Divvy reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Node {
    /// `metadata.uid`.
    pub uid: String,
    /// `metadata.name`.
    pub name: String,
    /// The first address of type InternalIP.
    pub address: Option<String>,
    /// `status.capacity` of `aliyun.com/gpu-mem`, in units. 0 if absent.
    pub capacity_units: u64,
    /// `status.capacity` of `aliyun.com/gpu-count`. 0 if absent.
    pub capacity_gpus: u64,
    /// How many GPUs and MIG devices the node offers as a whole, by kind. Kinds with 0 devices are omitted. Divvy's agent or another
    /// device plugin advertises them.
    pub whole: BTreeMap<WholeKind, u64>,
    /// `status.nodeInfo.containerRuntimeVersion`, such as `containerd://2.1.4`.
    pub runtime: Option<String>,
    /// `status.allocatable` of `aliyun.com/gpu-mem`, in units. It excludes the units of failed GPUs.
    pub allocatable_units: u64,
    /// `status.allocatable` of `aliyun.com/gpu-count`. 0 if absent.
    pub allocatable_gpus: u64,
    /// `status.allocatable` of CPU, in thousandths of a core.
    pub cpu_milli: u64,
    /// `status.allocatable` of main memory, in bytes.
    pub memory_bytes: u64,
    /// `status.allocatable` of pods, which is the largest number of pods that the node may run.
    pub pods: u64,
    /// `spec.unschedulable`: whether the node is cordoned.
    pub unschedulable: bool,
    /// The GPUs that administrators took out of service, by annotations ([`crate::names::OUT_OF_SERVICE`]).
    pub out_of_service: GpusOutOfService,
    /// The parsed annotation `divvy.dev/inventory`. `None` if it is absent, and an error if it cannot be read.
    pub inventory: Option<Result<Inventory, Error>>,
}
