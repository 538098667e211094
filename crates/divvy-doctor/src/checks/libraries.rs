//! Checks of the driver libraries.

use crate::check::{CheckVerdict, problem, skip};
use crate::facts::{Asked, DRIVER_CONTAINER, Facts};

/// Judge check D07.
pub(super) fn nvml(facts: &Facts<'_>) -> CheckVerdict {
    facts.nvidia()?;
    if facts.wsl() {
        let library = "/usr/lib/wsl/lib/libnvidia-ml.so.1";
        return if facts.exists(library) {
            Ok(library.to_owned())
        } else {
            problem(
                format!("there is no {library}"),
                "NVML cannot be loaded: Windows does not share an NVIDIA driver with WSL",
                "install NVIDIA's driver in Windows (not in WSL), then in PowerShell: wsl --update; wsl --shutdown",
            )
        };
    }
    let why =
        "every program that uses NVML fails: \"could not load NVML library: libnvidia-ml.so.1: cannot open shared object file\"";
    let Some(installed) = facts.installed() else {
        return problem(
            format!("neither libcuda nor libnvidia-ml exists below {}", facts.driver_root),
            why,
            format!(
                "install the driver libraries (Debian: libnvidia-ml1 libcuda1; Ubuntu: libnvidia-compute-VERSION; Red Hat: nvidia-driver-cuda-libs), or name \
                 their root directory: --driver-root {DRIVER_CONTAINER}"
            ),
        );
    };
    let name = "libnvidia-ml.so";
    let full = format!("{name}.{}", installed.version);
    let has = |file: &str| {
        installed.directories.iter().find_map(|directory| {
            let path = facts.of_driver(&format!("{directory}/{file}"));
            facts.exists(&path).then_some(path)
        })
    };
    if let Some(path) = has(&format!("{name}.1")) {
        return match &facts.probe {
            Asked::Failed(reason) if reason.contains("library_not_found") || reason.contains(name) => problem(
                format!("{path} exists but cannot be loaded: {reason}"),
                why,
                "reinstall the driver libraries; ldd on that file shows which libraries are missing",
            ),
            _ => Ok(path),
        };
    }
    match has(&full) {
        Some(path) => problem(
            format!("{path} has no {name}.1 next to it"),
            why,
            format!("ldconfig (below {})", facts.driver_root),
        ),
        None => problem(
            format!(
                "libcuda {} is in {}, but there is no {name}",
                installed.version,
                installed.directories.join(", ")
            ),
            why,
            "install the remaining driver libraries (Debian: libnvidia-ml1; Ubuntu: libnvidia-compute-VERSION; Red Hat: nvidia-driver-cuda-libs)",
        ),
    }
}

/// Judge check D05.
pub(super) fn same_version(facts: &Facts<'_>) -> CheckVerdict {
    let loaded = facts.nvidia_driver()?;
    let why = "NVML and CUDA do not work: \"Failed to initialize NVML: Driver/library version mismatch\"; running pods continue, new pods fail";
    let fix = "reboot; or, without a reboot: stop the programs that use GPUs, then rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia. \
               To keep unattended upgrades from doing this again: apt-mark hold 'nvidia-*' 'libnvidia-*'";
    if let Asked::Failed(reason) = &facts.probe
        && reason.contains("mismatch")
    {
        return problem(format!("kernel module {loaded}; NVML reports: {reason}"), why, fix);
    }
    match facts.installed() {
        None => skip("the driver libraries are not installed (D07)"),
        Some(installed) if installed.version == loaded => Ok(format!("both {loaded}")),
        Some(installed) => problem(format!("kernel module {loaded}, libraries {}", installed.version), why, fix),
    }
}
