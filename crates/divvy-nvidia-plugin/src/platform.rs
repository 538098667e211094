//! Decides whether a node is a Tegra, such as a Jetson. A Tegra's integrated GPU has neither a UUID nor its own device node.

use divvy_nvidia_config::{DeviceListStrategy, Discovery, NvidiaConfig, SharingStrategy};

use crate::{CONTROL_NODES, Error, PluginGpu, PluginMachine};

/// Where the devices of a node come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Platform {
    /// GPUs that NVML reports.
    Nvml,
    /// The integrated GPU of a Tegra. NVIDIA's container runtime knows it as the device `tegra`.
    Tegra,
}

/// What NVML has answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Nvml<'m> {
    /// The library is missing.
    Missing,
    /// The library exists, but does not describe any GPU.
    Silent,
    /// The product names of the GPUs.
    Gpus(Vec<&'m str>),
}

/// The device id of a Tegra's GPU.
const TEGRA: &str = "tegra";

/// The file that NVIDIA's Linux for Tegra has.
pub const RELEASE_FILE: &str = "/etc/nv_tegra_release";
/// The kernel's file with the name of the system-on-chip's family. [`is_tegra_family`] judges its content.
pub const FAMILY_FILE: &str = "/sys/devices/soc0/family";

/// Report whether a text is the name of a Tegra's family (go-nvlib, pkg/nvlib/info/property-extractor.go, `HasTegraFiles`).
pub fn is_tegra_family(text: &str) -> bool {
    text.get(..TEGRA.len()).is_some_and(|start| start.eq_ignore_ascii_case(TEGRA))
}

/// Return the platform whose devices are offered. `has_tegra_files` says whether the node has [`RELEASE_FILE`], or a
/// [`FAMILY_FILE`] that names a Tegra.
///
/// From Orin on, a Tegra also has an NVML, which reports little more than the name of the integrated GPU (go-nvlib,
/// pkg/nvlib/info/resolver.go). This function also answers correctly on WSL, which has an NVML and no Tegra files.
pub fn platform(discovery: Discovery, has_tegra_files: bool, nvml: &Nvml<'_>) -> Platform {
    let is_tegra = match (discovery, nvml) {
        (Discovery::Tegra, _) => true,
        (Discovery::Nvml | Discovery::Vfio, _) | (Discovery::Auto, Nvml::Silent) => false,
        (Discovery::Auto, Nvml::Missing) => has_tegra_files,
        (Discovery::Auto, Nvml::Gpus(names)) => names.iter().any(|name| is_integrated(name)),
    };
    if is_tegra { Platform::Tegra } else { Platform::Nvml }
}

/// Report whether a product name is that of an integrated GPU: `Orin (nvgpu)` or `NVIDIA Thor` (go-nvlib, pkg/nvlib/info,
/// `IsIntegratedGPUName`).
fn is_integrated(name: &str) -> bool {
    name.contains("(nvgpu)") || name.contains("NVIDIA Thor")
}

/// Check that a configuration can be served on a Tegra.
///
/// # Errors
/// Fails if the configuration needs a CDI spec or an MPS control daemon.
pub fn check_tegra(config: &NvidiaConfig) -> Result<(), Error> {
    let is_cdi =
        |strategy: &DeviceListStrategy| matches!(strategy, DeviceListStrategy::CdiAnnotations | DeviceListStrategy::CdiCri);
    if config.plugin.device_list_strategies.iter().any(is_cdi) {
        return Err(Error::CdiOnTegra);
    }
    if config.sharing.strategy == SharingStrategy::Mps {
        return Err(Error::MpsOnTegra);
    }
    Ok(())
}

impl PluginMachine {
    /// Return this machine as a Tegra: with one GPU, which has no device nodes, and whose health nothing reports (NVIDIA's plugin,
    /// internal/rm/tegra_devices.go). The driver's control nodes are left out, because NVIDIA's container runtime adds a Tegra's
    /// device nodes itself.
    pub fn into_tegra(mut self) -> PluginMachine {
        self.device_nodes.retain(|node| !CONTROL_NODES.contains(&node.as_str()));
        let gpu = PluginGpu {
            uuid: TEGRA.to_owned(),
            model: TEGRA.to_owned(),
            healthy: true,
            ..PluginGpu::default()
        };
        PluginMachine { gpus: vec![gpu], ..self }
    }
}
