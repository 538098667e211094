//! Nodes on which the driver's files are where packages and installers put them.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};

use super::container::{BenchContainer, LIBRARIES};
use super::packages::PackagedDriver;
use super::{CheckResult, DriverBench, place};

/// Where the files are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DriverLayout {
    /// As Debian's packages: in a directory of the branch, with links through `/etc/alternatives`.
    Debian,
    Lib64,
    Multiarch,
}

pub(crate) fn check(bench: &DriverBench) -> Result<CheckResult> {
    let (divvy, probe) = (bench.built("divvy")?, bench.built("divvy-probe")?);
    let mut found = CheckResult::default();
    for driver in &bench.drivers {
        for layout in [DriverLayout::Debian, DriverLayout::Lib64, DriverLayout::Multiarch] {
            let node = make(bench, driver, layout)?;
            let name = |what: &str| format!("{} {layout:?}: {what}", driver.branch);
            let said = |program: &Path, arguments: &[&str]| {
                let output = Command::new(program).args(arguments).output();
                let output = output.with_context(|| format!("{} could not be started", program.display()))?;
                let text = [output.stdout, output.stderr].concat();
                anyhow::Ok((output.status.success(), String::from_utf8_lossy(&text).into_owned()))
            };
            let root = node.display().to_string();
            let (_, spec) = said(&divvy, &["cdi", "generate", "--sys-root", &root])?;
            let is_there = spec.contains("libcuda.so.1") && spec.contains(&driver.version);
            found.note(name("divvy cdi generate finds the libraries"), is_there);
            let (is_good, _) = said(&divvy, &["doctor", "--root", &root, "--only", "D05,D07"])?;
            found.note(name("divvy doctor finds the libraries"), is_good);
            // As in a pod, in which the node's root is mounted somewhere. NVML that was loaded says that there is no kernel module.
            // NVML makes device nodes, so it gets a /dev of its own.
            let pod = BenchContainer::new(bench).mount(&bench.built, bench.built.clone());
            let answer = pod.run(&probe, &["--once", "--sys-root", &root, "--driver-root", &root])?;
            let answer = String::from_utf8_lossy(&[answer.stdout, answer.stderr].concat()).into_owned();
            found.note(name("divvy-probe loads NVML"), answer.contains("driver_not_loaded"));
            std::fs::remove_dir_all(&node).with_context(|| format!("{root} could not be removed"))?;
        }
    }
    Ok(found)
}

/// Make the files of a node with a GPU.
fn make(bench: &DriverBench, driver: &PackagedDriver, layout: DriverLayout) -> Result<PathBuf> {
    let node = bench.work.join("node");
    let at = |path: &str| node.join(path.trim_start_matches('/'));
    let write = |path: &str, text: &str| {
        let path = at(path);
        let directory = path.parent().context("a file is in a directory")?;
        std::fs::create_dir_all(directory).with_context(|| format!("{} could not be created", directory.display()))?;
        std::fs::write(&path, text).with_context(|| format!("{} could not be written", path.display()))
    };
    let link = |path: &str, target: &str| {
        let path = at(path);
        let directory = path.parent().context("a link is in a directory")?;
        std::fs::create_dir_all(directory).with_context(|| format!("{} could not be created", directory.display()))?;
        symlink(target, &path).with_context(|| format!("{} could not be created", path.display()))
    };
    let version = &driver.version;
    write(
        "/proc/driver/nvidia/version",
        &format!("NVRM version: NVIDIA UNIX x86_64 Kernel Module  {version}  Thu Jun  5 11:00:00 UTC 2025\n"),
    )?;
    write("/sys/module/nvidia/version", version)?;
    write(
        "/proc/driver/nvidia/gpus/0000:80:00.0/information",
        "Model: \t\t NVIDIA A100-SXM4-40GB\nGPU UUID: \t GPU-00010203-0405-4607-8809-0a0b0c0d0e0f\nBus Location: \t 0000:80:00.0\nDevice Minor: \t 0\n",
    )?;
    for name in ["nvidia0", "nvidiactl", "nvidia-uvm"] {
        write(&format!("/dev/{name}"), "")?;
    }
    place(&driver.smi, &at("/usr/bin/nvidia-smi"))?;
    let own = driver
        .libraries()
        .strip_prefix(&driver.root)
        .context("a library is below its root")?;
    let own = format!("/{}", own.display());
    for library in [&driver.cuda, &driver.nvml] {
        let file = library.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let soname = file.replace(version.as_str(), "1");
        match layout {
            DriverLayout::Debian => {
                place(library, &at(&format!("{own}/{file}")))?;
                link(&format!("{own}/{soname}"), &file)?;
                // What the packages' scripts do with update-alternatives.
                let alternative = format!("/etc/alternatives/nvidia--{soname}-x86_64-linux-gnu");
                link(&alternative, &format!("{own}/{soname}"))?;
                link(&format!("{LIBRARIES}/{soname}"), &alternative)?;
            }
            DriverLayout::Lib64 | DriverLayout::Multiarch => {
                let directory = if layout == DriverLayout::Lib64 {
                    "/usr/lib64"
                } else {
                    LIBRARIES
                };
                place(library, &at(&format!("{directory}/{file}")))?;
                link(&format!("{directory}/{soname}"), &file)?;
            }
        }
    }
    // It fails where the directories of the configuration are missing, and writes the cache nevertheless.
    let _ = Command::new("ldconfig").arg("-r").arg(&node).output();
    Ok(node)
}
