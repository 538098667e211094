//! Checks of Intel's GPUs and driver.

use divvy_model::Vendor;

use super::vendor_part::{VendorChecks, addresses};
use crate::check::{CheckStop, CheckVerdict, Severity, milder, problem, skip};
use crate::facts::Facts;

pub(super) const PART: VendorChecks = VendorChecks {
    modules,
    // D17 checks them, because no single module or file says that a driver should have made them.
    nodes: |_| None,
};

fn modules(facts: &Facts<'_>) -> Result<Vec<String>, CheckStop> {
    let modules = ["i915", "xe"].into_iter();
    let loaded: Vec<String> = modules
        .filter(|module| facts.exists(&format!("/sys/module/{module}")))
        .map(str::to_owned)
        .collect();
    if loaded.is_empty() && !facts.gpus_of(Vendor::Intel).is_empty() {
        return problem(
            "neither kernel module i915 nor xe is loaded",
            "no program can use an Intel GPU",
            "modprobe xe || modprobe i915",
        );
    }
    Ok(loaded)
}

/// Judge check D17.
pub(super) fn nodes(facts: &Facts<'_>) -> CheckVerdict {
    let gpus = facts.gpus_of(Vendor::Intel);
    if gpus.is_empty() {
        return skip("no Intel GPU here");
    }
    let mut wrong = Vec::new();
    for gpu in &gpus {
        match gpu.driver.as_deref() {
            Some("i915" | "xe") => {
                let nodes = facts.root.names(&format!("/sys/bus/pci/devices/{}/drm", gpu.address));
                let render = nodes.iter().find(|name| name.starts_with("renderD"));
                if !render.is_some_and(|name| facts.exists(&format!("/dev/dri/{name}"))) {
                    wrong.push(format!("{} has no /dev/dri/renderD*", gpu.address));
                }
            }
            Some(other) => wrong.push(format!("{} has the driver {other}", gpu.address)),
            None => wrong.push(format!("{} has no driver", gpu.address)),
        }
    }
    if wrong.is_empty() {
        return Ok(addresses(&gpus));
    }
    let found = wrong.join("; ");
    let why = "neither Divvy (gpu.intel.com/xe) nor Intel's device plugin (gpu.intel.com/i915, gpu.intel.com/xe) offers this GPU";
    let fix = "modprobe xe || modprobe i915; if vfio-pci has the GPU, it is reserved for a virtual machine: echo ADDRESS > /sys/bus/pci/drivers/vfio-pci/unbind; \
               with SR-IOV, create virtual functions: echo N > /sys/bus/pci/devices/ADDRESS/sriov_numvfs";
    if wrong.len() < gpus.len() {
        return milder(Severity::Warning, found, why, fix);
    }
    problem(found, why, fix)
}
