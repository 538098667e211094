//! The driver's libraries.

use crate::check::{Verdict, problem, skip};
use crate::facts::{Asked, DRIVER_CONTAINER, Facts};

/// D07
pub(super) fn nvml(facts: &Facts<'_>) -> Verdict {
    facts.nvidia()?;
    if facts.wsl() {
        let library = "/usr/lib/wsl/lib/libnvidia-ml.so.1";
        return match facts.exists(library) {
            true => Ok(library.to_owned()),
            false => problem(
                format!("there is no {library}"),
                "NVML cannot be loaded: Windows shares no NVIDIA driver with WSL",
                "install NVIDIA's driver for Windows (not in WSL), then in PowerShell: wsl --update; wsl --shutdown",
            ),
        };
    }
    let why =
        "everybody who asks the driver fails: \"could not load NVML library: libnvidia-ml.so.1: cannot open shared object file\"";
    let Some(installed) = facts.installed() else {
        return problem(
            format!("neither libcuda nor libnvidia-ml is below {}", facts.driver_root),
            why,
            format!(
                "install the driver's libraries (Debian: libnvidia-ml1 libcuda1; Ubuntu: libnvidia-compute-VERSION; Red Hat: nvidia-driver-cuda-libs), or say where \
                 they are: --driver-root {DRIVER_CONTAINER}"
            ),
        );
    };
    let name = "libnvidia-ml.so";
    let full = format!("{name}.{}", installed.version);
    let has = |file: &str| {
        installed.folders.iter().find_map(|folder| {
            let path = facts.of_driver(&format!("{folder}/{file}"));
            facts.exists(&path).then_some(path)
        })
    };
    if let Some(path) = has(&format!("{name}.1")) {
        return match &facts.probe {
            Asked::Failed(reason) if reason.contains("library_not_found") || reason.contains(name) => problem(
                format!("{path} is there, and cannot be loaded: {reason}"),
                why,
                "reinstall the driver's libraries; ldd on that file names what it misses",
            ),
            _ => Ok(path),
        };
    }
    match has(&full) {
        Some(path) => problem(
            format!("{path} is there, and no {name}.1 beside it"),
            why,
            format!("ldconfig (below {})", facts.driver_root),
        ),
        None => problem(
            format!(
                "libcuda of {} is in {}, and no {name}",
                installed.version,
                installed.folders.join(", ")
            ),
            why,
            "install the rest of the driver's libraries (Debian: libnvidia-ml1; Ubuntu: libnvidia-compute-VERSION; Red Hat: nvidia-driver-cuda-libs)",
        ),
    }
}

/// D05
pub(super) fn same_version(facts: &Facts<'_>) -> Verdict {
    let loaded = facts.nvidia_driver()?;
    let why = "NVML and CUDA refuse to work: \"Failed to initialize NVML: Driver/library version mismatch\"; pods that run go on, new ones fail";
    let fix = "reboot; or without: stop what uses the GPUs, then rmmod nvidia_uvm nvidia_drm nvidia_modeset nvidia && modprobe nvidia. \
               So that an unattended upgrade does not do it again: apt-mark hold 'nvidia-*' 'libnvidia-*'";
    if let Asked::Failed(reason) = &facts.probe
        && reason.contains("mismatch")
    {
        return problem(format!("kernel module {loaded}; NVML says: {reason}"), why, fix);
    }
    match facts.installed() {
        None => skip("the driver's libraries are not installed (D07)"),
        Some(installed) if installed.version == loaded => Ok(format!("both {loaded}")),
        Some(installed) => problem(format!("kernel module {loaded}, libraries {}", installed.version), why, fix),
    }
}
