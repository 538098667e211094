//! Checks of the GPU and the kernel driver that concern all vendors.

use divvy_model::Vendor;

use super::vendor_part::addresses;
use super::vendors;
use crate::check::{CheckVerdict, count, problem};
use crate::facts::{Facts, PciGpu};

/// Judge check D01.
pub(super) fn on_the_bus(facts: &Facts<'_>) -> CheckVerdict {
    if facts.wsl() {
        return Ok("WSL: the GPU of Windows is /dev/dxg".to_owned());
    }
    let (devices, gpus) = facts.pci();
    let mut parts = Vec::new();
    for vendor in Vendor::ALL {
        let own: Vec<PciGpu> = gpus.iter().filter(|gpu| gpu.vendor == vendor).cloned().collect();
        if !own.is_empty() {
            parts.push(format!("{} from {} ({})", own.len(), vendor.title(), addresses(&own)));
        }
    }
    if !parts.is_empty() {
        return Ok(parts.join(", "));
    }
    problem(
        match devices {
            0 => "there are no PCI devices (/sys/bus/pci/devices is empty)".to_owned(),
            devices => format!(
                "{} found, but no GPU from NVIDIA, AMD, or Intel",
                count(devices, "PCI device")
            ),
        },
        "this machine has no GPU to share; device plugins log \"No devices found. Waiting indefinitely.\"",
        "if this machine should have a GPU, check that the card is seated and powered, that the BIOS shows it (Above 4G Decoding), and, in a virtual \
         machine, that the GPU is passed through. If not, it needs no agent: exclude it from the DaemonSet's nodeSelector",
    )
}

/// Judge check D02.
pub(super) fn loaded(facts: &Facts<'_>) -> CheckVerdict {
    facts.any_gpu()?;
    if facts.wsl() {
        return Ok("WSL: the driver is part of Windows".to_owned());
    }
    let mut loaded = Vec::new();
    for vendor in vendors::ALL {
        loaded.extend((vendor.modules)(facts)?);
    }
    Ok(loaded.join(", "))
}
