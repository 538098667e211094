//! Checks of device nodes.

use std::collections::BTreeMap;

use divvy_cdi::generate::{amd, proc};

use crate::check::{Repair, Severity, Verdict, count, milder, problem, repaired_by, skip};
use crate::facts::{Facts, Vendor};

/// A device node that should exist.
struct Expected {
    path: String,
    /// The major and minor device number, if the kernel publishes them.
    number: Option<(u32, u32)>,
}

/// Return NVIDIA's device nodes. The numbers come from `/proc/devices`. Major 195 is registered for NVIDIA's GPUs and is the default.
fn nvidia(facts: &Facts<'_>) -> Vec<Expected> {
    let majors = majors(facts);
    let frontend = ["nvidia", "nvidia-frontend"]
        .iter()
        .find_map(|name| majors.get(*name).copied())
        .unwrap_or(195);
    let dev = facts.dev();
    let mut nodes = vec![Expected {
        path: format!("{dev}/nvidiactl"),
        number: Some((frontend, 255)),
    }];
    for gpu in proc::gpus(facts.tree) {
        nodes.push(Expected {
            path: format!("{dev}/nvidia{}", gpu.minor),
            number: Some((frontend, gpu.minor)),
        });
    }
    nodes.push(Expected {
        path: format!("{dev}/nvidia-uvm"),
        number: majors.get("nvidia-uvm").map(|major| (*major, 0)),
    });
    nodes
}

/// Return the majors of the character devices in `/proc/devices`, by name.
fn majors(facts: &Facts<'_>) -> BTreeMap<String, u32> {
    let text = facts.root.text("/proc/devices").unwrap_or_default();
    let lines = text.lines().take_while(|line| !line.starts_with("Block"));
    lines
        .filter_map(|line| {
            let (major, name) = line.trim().split_once(' ')?;
            Some((name.to_owned(), major.parse().ok()?))
        })
        .collect()
}

/// Judge check D09.
pub(super) fn there(facts: &Facts<'_>) -> Verdict {
    facts.any_gpu()?;
    if facts.wsl() {
        return Ok("/dev/dxg".to_owned());
    }
    let mut expected = Vec::new();
    let mut fix = Vec::new();
    if facts.loaded().is_some() {
        expected.extend(nvidia(facts));
        fix.push(
            "nvidia-modprobe -u -c 0 (-c N for each GPU N; udev's 71-nvidia.rules does this at boot), then generate the CDI specs again",
        );
    }
    if amd::is_there(facts.tree) {
        expected.push(Expected {
            path: "/dev/kfd".to_owned(),
            number: None,
        });
        for gpu in facts.gpus_of(Vendor::Amd) {
            let names = facts.root.names(&format!("/sys/bus/pci/devices/{}/drm", gpu.address));
            expected.extend(names.iter().filter(|name| name.starts_with("renderD")).map(|name| Expected {
                path: format!("/dev/dri/{name}"),
                number: None,
            }));
        }
        fix.push("modprobe amdgpu; udevadm trigger");
    }
    if expected.is_empty() {
        return skip("no NVIDIA or AMD driver is loaded (D02); D17 checks Intel's device nodes");
    }
    let mut wrong = Vec::new();
    let mut compared = 0;
    for node in &expected {
        if !facts.exists(&node.path) {
            wrong.push(format!("there is no {}", node.path));
            continue;
        }
        if let (Some(have), Some(wanted)) = (facts.root.device(&node.path), node.number) {
            compared += 1;
            if have != wanted {
                wrong.push(format!(
                    "{} is {}:{}, but the driver uses {}:{}",
                    node.path, have.0, have.1, wanted.0, wanted.1
                ));
            }
        }
    }
    let found = wrong.join("; ");
    let why = "programs in containers cannot open the GPU: CUDA reports \"no CUDA-capable device is detected\" or error 999";
    if wrong.is_empty() {
        let numbers = match expected.len() - compared {
            0 => String::new(),
            n if n == expected.len() => "; device numbers not compared".to_owned(),
            n => format!("; device numbers of {n} not compared"),
        };
        return Ok(format!("{} checked{numbers}", count(expected.len(), "device node")));
    }
    problem(found, why, fix.join("; "))
}

/// Judge check D10.
pub(super) fn char_links(facts: &Facts<'_>) -> Verdict {
    facts.nvidia_driver()?;
    let dev = facts.dev();
    let mut missing = Vec::new();
    let (mut present, mut without_node) = (0, 0);
    for node in nvidia(facts) {
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
    let verdict = match facts.has_spec("nvidia.com") {
        true => milder(Severity::Info, found, why, fix),
        false => problem(found, why, fix),
    };
    repaired_by(verdict, missing)
}
