//! Lays out scripts in place of the driver's programs for MPS, and tells what they were told.

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, ensure};
use divvy_testkit::mps::{calls, install};
use serde_json::{Value, json};

/// The files that a resource's daemon has, and those of all daemons.
const FILES: [&str; 7] = [
    ".ready",
    "nvidia.com/gpu/.started",
    "nvidia.com/gpu/pipe",
    "nvidia.com/gpu/log",
    "nvidia.com/gpu.shared/.started",
    "nvidia.com/gpu.shared/pipe",
    "nvidia.com/gpu.shared/log",
];

/// Lay out the driver's programs, and the directory of the daemons' files. Return the variable `PATH`.
pub(crate) fn prepare(scene: &Path) -> Result<OsString> {
    let programs = scene.join("bin");
    std::fs::create_dir(&programs)?;
    std::fs::create_dir(scene.join("mps"))?;
    install(&programs)?;
    let mut path = programs.into_os_string();
    path.push(":");
    path.push(std::env::var_os("PATH").context("PATH is not set")?);
    Ok(path)
}

/// Start the script of the control daemon for the resource `nvidia.com/gpu`, and write its marker.
pub(crate) fn start_control(scene: &Path) -> Result<()> {
    let resource = scene.join("mps/nvidia.com/gpu");
    for name in ["pipe", "log"] {
        std::fs::create_dir_all(resource.join(name))?;
    }
    control(scene, &["-d"], "")?;
    Ok(std::fs::write(resource.join(".started"), "")?)
}

/// End the script of the control daemon, and remove its marker.
pub(crate) fn end_control(scene: &Path) -> Result<()> {
    std::fs::remove_file(scene.join("mps/nvidia.com/gpu/.started"))?;
    control(scene, &[], "quit")
}

/// End the script of the control daemon if a scenario has left it running.
pub(crate) fn end_left_over(scene: &Path) -> Result<()> {
    if scene.join("mps/nvidia.com/gpu/pipe/nvidia-cuda-mps-control.pid").exists() {
        control(scene, &[], "quit")
    } else {
        Ok(())
    }
}

fn control(scene: &Path, arguments: &[&str], input: &str) -> Result<()> {
    let resource = scene.join("mps/nvidia.com/gpu");
    let mut child = Command::new(scene.join("bin/nvidia-cuda-mps-control"))
        .args(arguments)
        .env("CUDA_MPS_PIPE_DIRECTORY", resource.join("pipe"))
        .env("CUDA_MPS_LOG_DIRECTORY", resource.join("log"))
        .stdin(Stdio::piped())
        .spawn()?;
    let mut stdin = child.stdin.take().context("a pipe")?;
    std::io::Write::write_all(&mut stdin, input.as_bytes())?;
    drop(stdin);
    let status = child.wait()?;
    ensure!(status.success(), "the script of the control daemon ended with {status}");
    Ok(())
}

/// Return the calls of the driver's programs so far, and the files that exist.
pub(crate) fn state(scene: &Path) -> Result<Value> {
    let mut calls = calls(&scene.join("bin"))?;
    // NVIDIA's program goes through the GPUs in random order.
    calls
        .chunk_by_mut(|a, b| kind(a) == kind(b))
        .for_each(<[String]>::sort_unstable);
    let files = FILES.iter().filter(|name| scene.join("mps").join(name).exists());
    Ok(json!({"calls": calls, "files": files.collect::<Vec<_>>()}))
}

/// Return what calls have in common that differ only in the GPU.
fn kind(call: &str) -> Vec<&str> {
    let is_gpu =
        |word: &&str| word.starts_with("GPU-") || word.starts_with("MIG-") || word.bytes().all(|byte| byte.is_ascii_digit());
    call.split(' ').filter(|word| !is_gpu(word)).collect()
}
