use std::collections::BTreeSet;

use divvy_model::{GpuLink, MiB, MigDevice};

/// What a plugin knows about its node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginMachine {
    /// The GPUs, in the order of their indices.
    pub gpus: Vec<PluginGpu>,
    /// The device nodes that the plugin has found in its own container, such as `/dev/nvidiactl`.
    pub device_nodes: BTreeSet<String>,
    /// The CDI classes for which a spec exists, except `gpu`: for example `imex-channel`.
    pub cdi_classes: BTreeSet<String>,
}

/// A GPU, as the driver describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PluginGpu {
    /// NVML's UUID, or a made-up name if the GPU is [`PluginGpu::unreadable`].
    pub uuid: String,
    /// Whether the driver lost the GPU before any of its values could be read.
    pub unreadable: bool,
    /// Whether the driver has lost the GPU, or no longer lists it.
    pub lost: bool,
    /// NVML's index.
    pub index: u32,
    /// The number in `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    /// The product name.
    pub model: String,
    /// The total memory.
    pub memory: MiB,
    /// The compute capability.
    pub cc: Option<(u32, u32)>,
    /// The NUMA node.
    pub numa: Option<u32>,
    /// Connections to other GPUs.
    pub links: Vec<GpuLink>,
    /// Whether MIG is enabled; `None` if the GPU is not capable of MIG.
    pub mig: Option<bool>,
    /// The MIG devices.
    pub mig_devices: Vec<MigDevice>,
    /// Whether containers can use the GPU.
    pub healthy: bool,
    /// The UUIDs of MIG devices that containers cannot use although the GPU works.
    pub failed_mig_devices: BTreeSet<String>,
}

impl PluginMachine {
    /// Describe a GPU that the driver lost before any of its values could be read. It is offered as an unhealthy device, so that
    /// the node's capacity does not change when the GPU returns.
    pub fn unreadable(index: u32) -> PluginGpu {
        PluginGpu {
            uuid: format!("GPU-unreadable-{index}"),
            unreadable: true,
            index,
            ..PluginGpu::default()
        }
    }
}

impl PluginGpu {
    /// Report whether MIG is enabled.
    pub fn is_divided(&self) -> bool {
        self.mig == Some(true)
    }
}
