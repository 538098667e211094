//! What a container requests in addition to GPUs: GPUDirect Storage, RDMA, GDRCopy, NVSwitch, and IMEX channels. The environment
//! variables are those of NVIDIA's Container Toolkit.

use super::legacy;
use super::request::{RequestingContainer, imex_by_mount};
use super::settings::OciRuntimeSettings;
use divvy_cdi::generate::{Channels, Extras};

/// Read the request from the container's environment variables and mounts. Return what is granted, and one sentence for each part
/// of the request that is ignored.
///
/// The rule for the variables is the same as for GPUs: in an unprivileged container, they count only if the settings accept its
/// environment.
///
/// # Errors
/// [`legacy::LegacyError::Imex`] if an IMEX channel is not a valid number.
pub fn extras(
    container: &RequestingContainer,
    settings: &OciRuntimeSettings,
) -> Result<(Extras, Vec<String>), legacy::LegacyError> {
    let enabled = |name: &&str| container.variable(name) == Some("enabled");
    let mut asked: Vec<&str> = ["NVIDIA_GDS", "NVIDIA_MOFED", "NVIDIA_GDRCOPY", "NVIDIA_NVSWITCH"]
        .into_iter()
        .filter(enabled)
        .collect();
    let channels_by_variable = imex_by_mount(container, settings).is_empty() && container.variable(legacy::IMEX).is_some();
    if channels_by_variable && !settings.ignore_imex {
        asked.push(legacy::IMEX);
    }
    let mut ignored = Vec::new();
    let count = container.privileged || settings.accept_environment == Some(true);
    if !count && !asked.is_empty() {
        ignored.push(format!(
            "Ignoring devices requested by environment variable(s) in unprivileged container: [{}]",
            asked.join(" ")
        ));
    }
    let has = |name| count && asked.contains(&name);
    let channels = if channels_by_variable && !count {
        None
    } else {
        legacy::imex(container, settings)?
    };
    let imex = match channels {
        Some(names) if names.split(',').any(|name| name == "all") => Channels::All,
        Some(names) => Channels::Some(names.split(',').filter_map(|name| name.parse().ok()).collect()),
        None => Channels::default(),
    };
    let extras = Extras {
        storage: has("NVIDIA_GDS"),
        rdma: has("NVIDIA_MOFED"),
        gdrcopy: has("NVIDIA_GDRCOPY"),
        nvswitch: has("NVIDIA_NVSWITCH"),
        imex,
    };
    Ok((extras, ignored))
}
