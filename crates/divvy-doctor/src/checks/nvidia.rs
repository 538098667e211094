//! Checks of NVIDIA's GPUs and driver.

use divvy_cdi::generate::proc;
use divvy_cdi::stale::majors;
use divvy_model::Vendor;
use divvy_model::nvidia::xid;

use super::vendor_part::{DeviceNodes, ExpectedNode, VendorChecks, addresses};
use crate::check::{CheckStop, CheckVerdict, Repair, Severity, blind, count, milder, problem, repaired_by, skip};
use crate::facts::programs::ProbedGpu;
use crate::facts::{Asked, Facts, version_at_least};

pub(super) const PART: VendorChecks = VendorChecks { modules, nodes };

fn modules(facts: &Facts<'_>) -> Result<Vec<String>, CheckStop> {
    match facts.loaded() {
        Some(version) => Ok(vec![format!("nvidia {version}")]),
        None if facts.exists("/sys/module/nvidia") || facts.exists("/proc/driver/nvidia/version") => {
            Ok(vec!["nvidia".to_owned()])
        }
        None if facts.gpus_of(Vendor::Nvidia).is_empty() => Ok(Vec::new()),
        None => problem(
            "the kernel module nvidia is not loaded (no /sys/module/nvidia, no /proc/driver/nvidia/version)",
            "no program can use an NVIDIA GPU; NVML reports \"driver not loaded\", nvidia-smi \"couldn't communicate with the NVIDIA driver\"",
            install(facts),
        ),
    }
}

fn install(facts: &Facts<'_>) -> String {
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

/// Return the device nodes that should exist. Their numbers come from `/proc/devices`. Major number 195 is registered for
/// NVIDIA's GPUs, and is the default.
fn expected(facts: &Facts<'_>) -> Vec<ExpectedNode> {
    let majors = majors(&facts.root);
    let frontend = ["nvidia", "nvidia-frontend"]
        .iter()
        .find_map(|name| majors.get(*name).copied())
        .unwrap_or(195);
    let dev = facts.dev();
    let mut nodes = vec![ExpectedNode {
        path: format!("{dev}/nvidiactl"),
        number: Some((frontend, 255)),
    }];
    for gpu in proc::gpus(facts.tree) {
        nodes.push(ExpectedNode {
            path: format!("{dev}/nvidia{}", gpu.minor),
            number: Some((frontend, gpu.minor)),
        });
    }
    nodes.push(ExpectedNode {
        path: format!("{dev}/nvidia-uvm"),
        number: majors.get("nvidia-uvm").map(|major| (*major, 0)),
    });
    nodes
}

fn nodes(facts: &Facts<'_>) -> Option<DeviceNodes> {
    facts.loaded()?;
    Some(DeviceNodes {
        expected: expected(facts),
        create: "nvidia-modprobe -u -c 0 (-c N for each GPU N; udev's 71-nvidia.rules does this at boot), then generate the CDI specs again",
    })
}

/// Judge check D03.
pub(super) fn for_plugins(facts: &Facts<'_>) -> CheckVerdict {
    at_least(facts, &[384, 81], "device plugins cannot initialize NVML of an older driver")
}

/// Judge check D04.
pub(super) fn for_containers(facts: &Facts<'_>) -> CheckVerdict {
    at_least(
        facts,
        &[418, 81, 7],
        "nvidia-container-toolkit does not start containers with an older driver, and CUDA images need a newer one anyway",
    )
}

fn at_least(facts: &Facts<'_>, least: &[u32], why: &str) -> CheckVerdict {
    let version = facts.nvidia_driver()?;
    if version_at_least(&version, least) {
        Ok(version)
    } else {
        problem(
            format!("driver {version} is loaded"),
            why,
            "upgrade the driver (NVIDIA maintains 550 and later), then reboot",
        )
    }
}

/// Judge check D06.
pub(super) fn nouveau(facts: &Facts<'_>) -> CheckVerdict {
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
pub(super) fn answers(facts: &Facts<'_>) -> CheckVerdict {
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
            Err(CheckStop::Problem(finding)) => Err(CheckStop::Milder(Severity::Warning, finding)),
            other => other,
        },
        (true, _) => problem(
            "the driver is loaded but finds no GPU",
            "nvidia-smi prints \"No devices were found\": the kernel module could not start the card",
            "dmesg | grep -e NVRM -e nvidia shows why (power cables, firmware, a card too old for this driver, nouveau)",
        ),
    }
}

fn fatal(xids: &[String]) -> CheckVerdict {
    problem(
        format!("the kernel has logged since boot: {}", xids.join("; ")),
        "after these errors a GPU cannot run new work until it is reset",
        "kubectl drain NODE --ignore-daemonsets, then nvidia-smi --gpu-reset -i INDEX, or reboot; NVIDIA's XID documentation explains each number",
    )
}

/// Return the XIDs in the kernel log after which a GPU needs more than the end of one program. Each combination of GPU and XID is returned once. A log
/// line looks like this: `NVRM: Xid (PCI:0000:81:00): 79, pid=1, GPU has fallen off the bus.`.
fn fatal_xids(facts: &Facts<'_>) -> Vec<String> {
    let mut found = Vec::new();
    for line in facts.kernel_log.answer().into_iter().flat_map(|log| log.lines()) {
        let Some((place, rest)) = line.split_once("NVRM: Xid (").and_then(|(_, rest)| rest.split_once("):")) else {
            continue;
        };
        let number: String = rest.trim_start().chars().take_while(char::is_ascii_digit).collect();
        let text = format!("XID {number} on {}", place.trim_start_matches("PCI:"));
        if number.parse().is_ok_and(|number| xid::is_fatal(number, rest)) && !found.contains(&text) {
            found.push(text);
        }
    }
    found
}

/// Judge check D08.
pub(super) fn capability(facts: &Facts<'_>) -> CheckVerdict {
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
pub(super) fn compute_mode(facts: &Facts<'_>) -> CheckVerdict {
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
pub(super) fn persistence(facts: &Facts<'_>) -> CheckVerdict {
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
pub(super) fn mig(facts: &Facts<'_>) -> CheckVerdict {
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

fn probed<'f>(facts: &'f Facts<'_>) -> Result<&'f [ProbedGpu], CheckStop> {
    facts.nvidia()?;
    match &facts.probe {
        Asked::Answer(probed) => Ok(&probed.gpus),
        Asked::Failed(reason) | Asked::Blocked(reason) => blind(format!("the driver did not answer: {reason}")),
        Asked::Absent(reason) | Asked::Not(reason) => skip(reason.clone()),
    }
}

/// Return a suffix that names the GPUs for which the driver does not report the value. It is empty if there are none.
fn left_out<'g>(gpus: impl Iterator<Item = &'g ProbedGpu>) -> String {
    let names: Vec<String> = gpus.map(|gpu| format!("GPU {}", gpu.index)).collect();
    if names.is_empty() {
        String::new()
    } else {
        format!("; not checked: {} (the driver does not report it)", names.join(", "))
    }
}

/// Judge check D10.
pub(super) fn char_links(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia_driver()?;
    let dev = facts.dev();
    let mut missing = Vec::new();
    let (mut present, mut without_node) = (0, 0);
    for node in expected(facts) {
        let number = facts.root.device(&node.path).or(node.number);
        let (Some((major, minor)), true) = (number, facts.exists(&node.path)) else {
            without_node += 1;
            continue;
        };
        let link = format!("/dev/char/{major}:{minor}");
        let name = node.path.rsplit('/').next().unwrap_or_default();
        match facts.root.link(&link) {
            Some(target) if target.rsplit('/').next() == Some(name) => present += 1,
            _ => missing.push(Repair::Link {
                path: link,
                target: match dev.as_str() {
                    "/dev" => format!("../{name}"),
                    _ => node.path,
                },
            }),
        }
    }
    if missing.is_empty() {
        return match present {
            0 => skip("no device nodes (D09)"),
            _ => Ok(match without_node {
                0 => count(present, "link"),
                n => format!(
                    "{}; not checked: {} missing (D09)",
                    count(present, "link"),
                    count(n, "device node")
                ),
            }),
        };
    }
    let links: Vec<String> = missing
        .iter()
        .filter_map(|repair| match repair {
            Repair::Link { path, target } => Some(format!("{path} → {target}")),
            _ => None,
        })
        .collect();
    let found = format!("missing: {}", links.join(", "));
    let why = "systemctl daemon-reload takes the devices away from running containers that got them by means other than CDI: \"Failed to initialize NVML: \
               Unknown Error\"";
    let fix = "divvy doctor --fix --only D10 creates the links until the next boot; this udev rule creates them at every boot: \
               ACTION==\"add\", DEVPATH==\"/bus/pci/drivers/nvidia\", RUN+=\"/usr/local/bin/divvy doctor --fix --only D10\"";
    // With CDI the OCI runtime allows the devices in the cgroup and passes the rules to systemd, so a reload keeps them.
    let verdict = if facts.has_spec("nvidia.com") {
        milder(Severity::Info, found, why, fix)
    } else {
        problem(found, why, fix)
    };
    repaired_by(verdict, missing)
}
