//! Checks of the GPU and the kernel driver.

use divvy_model::nvidia::xid_is_fatal;

use crate::check::{Severity, Stop, Verdict, blind, count, milder, problem, skip};
use crate::facts::programs::ProbedGpu;
use crate::facts::{Asked, Facts, PciGpu, Vendor, version_at_least};

fn addresses(gpus: &[PciGpu]) -> String {
    gpus.iter().map(|gpu| gpu.address.as_str()).collect::<Vec<_>>().join(", ")
}

/// Judge check D01.
pub(super) fn on_the_bus(facts: &Facts<'_>) -> Verdict {
    if facts.wsl() {
        return Ok("WSL: the GPU of Windows is /dev/dxg".to_owned());
    }
    let (devices, gpus) = facts.pci();
    let mut parts = Vec::new();
    for vendor in [Vendor::Nvidia, Vendor::Amd, Vendor::Intel] {
        let own: Vec<PciGpu> = gpus.iter().filter(|gpu| gpu.vendor == vendor).cloned().collect();
        if !own.is_empty() {
            parts.push(format!("{} from {} ({})", own.len(), vendor.name(), addresses(&own)));
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
pub(super) fn loaded(facts: &Facts<'_>) -> Verdict {
    facts.any_gpu()?;
    if facts.wsl() {
        return Ok("WSL: the driver is part of Windows".to_owned());
    }
    let mut loaded = Vec::new();
    let has = |vendor| !facts.gpus_of(vendor).is_empty();
    match facts.loaded() {
        Some(version) => loaded.push(format!("nvidia {version}")),
        None if facts.exists("/sys/module/nvidia") || facts.exists("/proc/driver/nvidia/version") => {
            loaded.push("nvidia".to_owned())
        }
        None if has(Vendor::Nvidia) => {
            return problem(
                "the kernel module nvidia is not loaded (no /sys/module/nvidia, no /proc/driver/nvidia/version)",
                "no program can use an NVIDIA GPU; NVML reports \"driver not loaded\", nvidia-smi \"couldn't communicate with the NVIDIA driver\"",
                install_nvidia(facts),
            );
        }
        None => {}
    }
    if facts.exists("/sys/module/amdgpu") {
        loaded.push("amdgpu".to_owned());
    } else if has(Vendor::Amd) {
        return problem(
            "the kernel module amdgpu is not loaded (no /sys/module/amdgpu)",
            "no program can use an AMD GPU",
            "modprobe amdgpu; if the module does not exist, install linux-modules-extra or AMD's amdgpu-dkms",
        );
    }
    let intel: Vec<&str> = ["i915", "xe"]
        .into_iter()
        .filter(|module| facts.exists(&format!("/sys/module/{module}")))
        .collect();
    if intel.is_empty() && has(Vendor::Intel) {
        return problem(
            "neither kernel module i915 nor xe is loaded",
            "no program can use an Intel GPU",
            "modprobe xe || modprobe i915",
        );
    }
    loaded.extend(intel.into_iter().map(str::to_owned));
    Ok(loaded.join(", "))
}

fn install_nvidia(facts: &Facts<'_>) -> String {
    if facts.installed().is_some() {
        return "modprobe nvidia && nvidia-modprobe -c 0 -u; if that fails, dmesg | grep -i -e nvrm -e nvidia says why (Secure Boot, or no module was \
                built for this kernel: dkms status)"
            .to_owned();
    }
    let install = if facts.is_like("ubuntu") {
        "ubuntu-drivers install --gpgpu"
    } else if facts.is_like("debian") {
        "apt-get install nvidia-driver"
    } else if facts.is_like("rhel") || facts.is_like("fedora") {
        "dnf install nvidia-driver-cuda kmod-nvidia-open-dkms (from NVIDIA's repository)"
    } else {
        "install the NVIDIA driver with your distribution's package"
    };
    format!("{install}, then: modprobe nvidia && nvidia-modprobe -c 0 -u")
}

/// Judge check D03.
pub(super) fn for_plugins(facts: &Facts<'_>) -> Verdict {
    at_least(facts, &[384, 81], "device plugins cannot initialize NVML of an older driver")
}

/// Judge check D04.
pub(super) fn for_containers(facts: &Facts<'_>) -> Verdict {
    at_least(
        facts,
        &[418, 81, 7],
        "nvidia-container-toolkit does not start containers with an older driver, and CUDA images need a newer one anyway",
    )
}

fn at_least(facts: &Facts<'_>, least: &[u32], why: &str) -> Verdict {
    let version = facts.nvidia_driver()?;
    match version_at_least(&version, least) {
        true => Ok(version),
        false => problem(
            format!("driver {version} is loaded"),
            why,
            "upgrade the driver (NVIDIA maintains 550 and later), then reboot",
        ),
    }
}

/// Judge check D06.
pub(super) fn nouveau(facts: &Facts<'_>) -> Verdict {
    let mut taken = facts.gpus_of(Vendor::Nvidia);
    if taken.is_empty() {
        return skip("no NVIDIA GPU here");
    }
    let all = taken.len();
    taken.retain(|gpu| gpu.driver.as_deref() == Some("nouveau"));
    let in_the_way = facts.exists("/sys/module/nouveau") && facts.loaded().is_none();
    if taken.is_empty() && !in_the_way {
        return Ok(format!("{} checked", count(all, "GPU")));
    }
    let found = match taken.as_slice() {
        [] => "the kernel module nouveau is loaded, but nvidia is not".to_owned(),
        taken => format!("nouveau drives {}", addresses(taken)),
    };
    problem(
        found,
        "nouveau cannot run CUDA, and NVIDIA's driver cannot use a GPU that nouveau drives: nvidia-smi prints \"No devices were found\"",
        "printf 'blacklist nouveau\\noptions nouveau modeset=0\\n' > /etc/modprobe.d/nouveau.conf; then update-initramfs -u (Debian, Ubuntu) or dracut --force \
         (Red Hat); then reboot",
    )
}

/// Judge check D11.
pub(super) fn answers(facts: &Facts<'_>) -> Verdict {
    facts.nvidia()?;
    let xids = fatal_xids(facts);
    let probed = match &facts.probe {
        Asked::Answer(probed) => probed,
        Asked::Failed(reason) => {
            return problem(
                format!("the driver does not answer: {reason}"),
                "no program can use a GPU of this machine until the driver answers",
                "nvidia-smi -L shows whether the driver answers other programs; dmesg | grep NVRM shows the driver's errors; reboot if the driver hangs",
            );
        }
        _ if !xids.is_empty() => return fatal(&xids),
        Asked::Blocked(reason) => return blind(reason.clone()),
        Asked::Absent(reason) | Asked::Not(reason) => return skip(reason.clone()),
    };
    let mut broken: Vec<String> = Vec::new();
    for gpu in &probed.gpus {
        if gpu.lost {
            broken.push(format!("GPU {} ({}): GPU is lost", gpu.index, gpu.uuid));
        } else if let Some(error) = &gpu.error {
            broken.push(format!("GPU {} ({}): {error}", gpu.index, gpu.uuid));
        }
    }
    broken.extend(
        probed
            .unreadable
            .iter()
            .map(|gpu| format!("GPU {}: {}", gpu.index, gpu.error)),
    );
    if !broken.is_empty() {
        broken.extend(xids);
        return problem(
            broken.join("; "),
            "pods on this GPU fail (\"GPU is lost\"); some device plugins then withdraw the node's other GPUs as well",
            "kubectl drain NODE --ignore-daemonsets, then nvidia-smi --gpu-reset -i INDEX, or reboot; if the error returns, the card or its power supply is defective",
        );
    }
    match (probed.gpus.is_empty(), xids.is_empty()) {
        (false, true) => Ok(format!(
            "all {}{}",
            probed.gpus.len(),
            match &facts.kernel_log {
                Asked::Answer(_) => String::new(),
                other => format!("; the kernel log was not checked: {}", other.reason()),
            }
        )),
        // The log does not say whether the GPU was reset after the XID, so this is only a warning.
        (false, false) => match fatal(&xids) {
            Err(Stop::Problem(finding)) => Err(Stop::Milder(Severity::Warning, finding)),
            other => other,
        },
        (true, _) => problem(
            "the driver is loaded but finds no GPU",
            "nvidia-smi prints \"No devices were found\": the kernel module could not start the card",
            "dmesg | grep -e NVRM -e nvidia shows why (power cables, firmware, a card too old for this driver, nouveau)",
        ),
    }
}

fn fatal(xids: &[String]) -> Verdict {
    problem(
        format!("the kernel has logged since boot: {}", xids.join("; ")),
        "after these errors a GPU cannot run new work until it is reset",
        "kubectl drain NODE --ignore-daemonsets, then nvidia-smi --gpu-reset -i INDEX, or reboot; NVIDIA's XID documentation explains each number",
    )
}

/// Return the XIDs in the kernel log that are not caused by programs, each GPU and number once. A log line looks like
/// `NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.`.
fn fatal_xids(facts: &Facts<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for line in facts.kernel_log.answer().into_iter().flat_map(|log| log.lines()) {
        let Some((place, rest)) = line.split_once("NVRM: Xid (").and_then(|(_, rest)| rest.split_once("):")) else {
            continue;
        };
        let number: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        let text = format!("XID {number} on {}", place.trim_start_matches("PCI:"));
        if number.parse().is_ok_and(xid_is_fatal) && !found.contains(&text) {
            found.push(text);
        }
    }
    found
}

/// Judge check D08.
pub(super) fn capability(facts: &Facts<'_>) -> Verdict {
    let gpus = probed(facts)?;
    let old: Vec<String> = gpus
        .iter()
        .filter(|gpu| !gpu.cc.is_empty() && !version_at_least(&gpu.cc, &[3, 0]))
        .map(|gpu| format!("GPU {} ({}) has {}", gpu.index, gpu.model, gpu.cc))
        .collect();
    if old.is_empty() {
        let silent = left_out(gpus.iter().filter(|gpu| gpu.cc.is_empty()));
        let mut known: Vec<&str> = gpus.iter().map(|gpu| gpu.cc.as_str()).filter(|cc| !cc.is_empty()).collect();
        known.sort_unstable();
        known.dedup();
        return match known.as_slice() {
            [] => skip("the driver does not report it"),
            known => Ok(format!("{}{silent}", known.join(", "))),
        };
    }
    problem(
        old.join("; "),
        "CUDA images contain no code for this GPU: \"no kernel image is available for execution on the device\"",
        "exclude the GPU with NVIDIA_VISIBLE_DEVICES in the agent's DaemonSet, or send pods to other GPUs with the annotation divvy.dev/gpu-model",
    )
}

/// Judge check D12.
pub(super) fn compute_mode(facts: &Facts<'_>) -> Verdict {
    let gpus = probed(facts)?;
    let modes: Vec<_> = gpus
        .iter()
        .filter_map(|gpu| Some((gpu, gpu.compute_mode.as_deref()?)))
        .collect();
    if modes.is_empty() {
        return skip("the driver does not report it");
    }
    let other: Vec<_> = modes.iter().filter(|(_, mode)| *mode != "default").collect();
    if other.is_empty() {
        let silent = left_out(gpus.iter().filter(|gpu| gpu.compute_mode.is_none()));
        return Ok(format!("default on {}{silent}", modes.len()));
    }
    let found: Vec<String> = other.iter().map(|(gpu, mode)| format!("GPU {}: {mode}", gpu.index)).collect();
    let fix: Vec<String> = other
        .iter()
        .map(|(gpu, _)| format!("nvidia-smi -i {} -c 0", gpu.index))
        .collect();
    problem(
        found.join(", "),
        "the second pod on that GPU fails: \"all CUDA-capable devices are busy or unavailable\"",
        fix.join("; "),
    )
}

/// Judge check D13.
pub(super) fn persistence(facts: &Facts<'_>) -> Verdict {
    facts.nvidia_driver()?;
    let socket = facts.of_driver("/run/nvidia-persistenced/socket");
    if facts.exists(&socket) {
        return Ok(format!("nvidia-persistenced is running ({socket})"));
    }
    if let Some(probed) = facts.probe.answer() {
        let on = probed.gpus.iter().filter(|gpu| gpu.persistence == Some(true)).count();
        if on > 0 && on == probed.gpus.len() {
            return Ok(format!("persistence mode is on for {}", count(on, "GPU")));
        }
    }
    problem(
        "nvidia-persistenced is not running, and the driver does not report persistence mode as on",
        "the driver shuts a GPU down when its last client ends, and the next container waits seconds for the GPU to start",
        "systemctl enable --now nvidia-persistenced",
    )
}

/// Judge check D14.
pub(super) fn mig(facts: &Facts<'_>) -> Verdict {
    let gpus = probed(facts)?;
    let known: Vec<_> = gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.mig?))).collect();
    if known.is_empty() {
        return skip("no GPU here supports MIG");
    }
    let pending: Vec<_> = known.iter().filter(|(_, (current, pending))| current != pending).collect();
    if pending.is_empty() {
        let on = known.iter().filter(|(_, (current, _))| *current).count();
        let without = match gpus.len() - known.len() {
            0 => String::new(),
            n => format!("; {n} without MIG support"),
        };
        return Ok(format!("on for {on} of {}{without}", known.len()));
    }
    let word = |on: bool| if on { "on" } else { "off" };
    let found: Vec<String> = pending
        .iter()
        .map(|(index, (current, pending))| format!("GPU {index}: {} now, {} after a reset", word(*current), word(*pending)))
        .collect();
    let fix: Vec<String> = pending
        .iter()
        .map(|(index, _)| format!("nvidia-smi --gpu-reset -i {index}"))
        .collect();
    problem(
        found.join("; "),
        "\"MIG mode is in pending enable state\": device plugins offer the GPU in the old mode, and labels say …-MIG-INVALID",
        format!(
            "stop the programs that use the GPU (nvidia-smi lists them; kubectl drain), then: {}; or reboot",
            fix.join("; ")
        ),
    )
}

fn probed<'f>(facts: &'f Facts<'_>) -> Result<&'f [ProbedGpu], Stop> {
    facts.nvidia()?;
    match &facts.probe {
        Asked::Answer(probed) => Ok(&probed.gpus),
        Asked::Failed(reason) | Asked::Blocked(reason) => blind(format!("the driver did not answer: {reason}")),
        Asked::Absent(reason) | Asked::Not(reason) => skip(reason.clone()),
    }
}

/// Return the suffix that names the GPUs for which the driver does not report the value, empty if there are none.
fn left_out<'g>(gpus: impl Iterator<Item = &'g ProbedGpu>) -> String {
    let names: Vec<String> = gpus.map(|gpu| format!("GPU {}", gpu.index)).collect();
    match names.is_empty() {
        true => String::new(),
        false => format!("; not checked: {} (the driver does not report it)", names.join(", ")),
    }
}

/// Judge check D15.
pub(super) fn amd(facts: &Facts<'_>) -> Verdict {
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
pub(super) fn amd_partitions(facts: &Facts<'_>) -> Verdict {
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

/// Judge check D17.
pub(super) fn intel(facts: &Facts<'_>) -> Verdict {
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
    let why = "Intel's device plugin does not offer this GPU: gpu.intel.com/i915 or gpu.intel.com/xe is missing on the node";
    let fix = "modprobe xe || modprobe i915; if vfio-pci has the GPU, it is reserved for a virtual machine: echo ADDRESS > /sys/bus/pci/drivers/vfio-pci/unbind; \
               with SR-IOV, create virtual functions: echo N > /sys/bus/pci/devices/ADDRESS/sriov_numvfs";
    if wrong.len() < gpus.len() {
        return milder(Severity::Warning, found, why, fix);
    }
    problem(found, why, fix)
}
