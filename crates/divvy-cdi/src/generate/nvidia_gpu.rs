//! A GPU of NVIDIA, as a spec needs it.

use serde::{Deserialize, Serialize};

/// A GPU as the driver reports it, from NVML or from [`super::proc::gpus`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NvidiaGpu {
    /// NVML's index, from 0.
    pub index: u32,
    /// The UUID in the form `GPU-…`; `None` if it is unknown, because no program has used the driver yet.
    pub uuid: Option<String>,
    /// The minor number of `/dev/nvidia<minor>`, which may differ from the index.
    pub minor: u32,
    /// The PCI address, such as `0000:81:00.0`.
    pub pci: String,
    /// The MIG devices; `None` if MIG is disabled or not known to be enabled. If MIG is enabled, no program can run on the whole GPU, so the GPU
    /// itself is not a device of the spec.
    pub mig: Option<Vec<Mig>>,
}

/// A MIG device: a compute instance of a GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mig {
    /// NVML's index among the MIG devices of the GPU, from 0.
    pub index: u32,
    /// The UUID in the form `MIG-…`; only NVML knows it.
    pub uuid: Option<String>,
    /// The ID of the GPU instance.
    pub gpu_instance: u32,
    /// The ID of the compute instance.
    pub compute_instance: u32,
    /// The minor numbers of `/dev/nvidia-caps/nvidia-cap<minor>` that give access to the GPU instance and to the compute instance; `None` if they are
    /// unknown.
    pub capabilities: Option<(u32, u32)>,
}

impl Mig {
    /// Return the paths of the capability device nodes: for the GPU instance and for the compute instance. Return `None` if they are unknown.
    pub fn nodes(&self) -> Option<[String; 2]> {
        let (gi, ci) = self.capabilities?;
        Some([gi, ci].map(|minor| format!("/dev/nvidia-caps/nvidia-cap{minor}")))
    }
}
