//! Checks of AMD's GPUs and driver.

use divvy_cdi::generate::amd as topology;
use divvy_model::Vendor;

use super::vendor_part::{DeviceNodes, ExpectedNode, VendorChecks};
use crate::check::{CheckStop, CheckVerdict, problem, skip};
use crate::facts::Facts;

pub(super) const PART: VendorChecks = VendorChecks { modules, nodes };

fn modules(facts: &Facts<'_>) -> Result<Vec<String>, CheckStop> {
    if facts.exists("/sys/module/amdgpu") {
        return Ok(vec!["amdgpu".to_owned()]);
    }
    if facts.gpus_of(Vendor::Amd).is_empty() {
        return Ok(Vec::new());
    }
    problem(
        "the kernel module amdgpu is not loaded (no /sys/module/amdgpu)",
        "no program can use an AMD GPU",
        "modprobe amdgpu; if the module does not exist, install linux-modules-extra or AMD's amdgpu-dkms",
    )
}

fn nodes(facts: &Facts<'_>) -> Option<DeviceNodes> {
    if !topology::is_there(facts.tree) {
        return None;
    }
    let expected = |path: String| ExpectedNode { path, number: None };
    let mut nodes = vec![expected("/dev/kfd".to_owned())];
    for gpu in facts.gpus_of(Vendor::Amd) {
        let names = facts.root.names(&format!("/sys/bus/pci/devices/{}/drm", gpu.address));
        let render = names.iter().filter(|name| name.starts_with("renderD"));
        nodes.extend(render.map(|name| expected(format!("/dev/dri/{name}"))));
    }
    Some(DeviceNodes {
        expected: nodes,
        create: "modprobe amdgpu; udevadm trigger",
    })
}

/// Judge check D15.
pub(super) fn compute(facts: &Facts<'_>) -> CheckVerdict {
    if facts.gpus_of(Vendor::Amd).is_empty() && !facts.exists("/sys/class/kfd") {
        return skip("no AMD GPU here");
    }
    let missing: Vec<&str> = ["/sys/class/kfd", "/sys/module/amdgpu/drivers"]
        .into_iter()
        .filter(|path| !facts.exists(path))
        .collect();
    if missing.is_empty() {
        return Ok("/sys/class/kfd and /sys/module/amdgpu/drivers exist".to_owned());
    }
    problem(
        format!("there is no {}", missing.join(" and no ")),
        "AMD's device plugin finds no GPU: it waits without a message, or exits with status 2",
        "modprobe amdgpu; if /sys/class/kfd does not appear, install AMD's amdgpu-dkms: the kernel's own module was built without compute (CONFIG_HSA_AMD)",
    )
}

/// Judge check D16.
pub(super) fn partitions(facts: &Facts<'_>) -> CheckVerdict {
    let gpus = facts.gpus_of(Vendor::Amd);
    let mut found: Vec<(String, String)> = Vec::new();
    for gpu in &gpus {
        let read = |file: &str| facts.root.text(&format!("/sys/bus/pci/devices/{}/{file}", gpu.address));
        let (compute, memory) = (read("current_compute_partition"), read("current_memory_partition"));
        if compute.is_some() || memory.is_some() {
            let part = |value: Option<String>| value.unwrap_or_else(|| "-".to_owned()).to_lowercase();
            found.push((gpu.address.clone(), format!("{}_{}", part(compute), part(memory))));
        }
    }
    let Some((_, first)) = found.first().cloned() else {
        return skip("no AMD GPU here can be partitioned");
    };
    if found.iter().all(|(_, style)| *style == first) {
        let without = match gpus.len() - found.len() {
            0 => String::new(),
            n => format!("; {n} cannot be partitioned"),
        };
        return Ok(format!("{first} on {}{without}", found.len()));
    }
    let each: Vec<String> = found.iter().map(|(address, style)| format!("{address} is {style}")).collect();
    problem(
        each.join(", "),
        "AMD's device plugin exits: \"Partitions of different styles … not supported with single strategy\"",
        "partition all GPUs the same way (amd-smi set --gpu all --compute-partition SPX), or start AMD's plugin with -resource_naming_strategy=mixed",
    )
}
