//! A machine's simulated driver, and the directories in which the driver and the agent keep files.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// Send one request to the control socket of a simulated NVML library.
pub async fn ask(socket: &Path, request: &Value) -> io::Result<()> {
    answer(socket, request).await.map(drop)
}

/// Return the limits of cgroups' memory that a simulated NVML library has, on all GPUs: bytes by the cgroup's directory. A limit ends with its
/// cgroup.
pub async fn limits(socket: &Path) -> io::Result<BTreeMap<String, u64>> {
    let state = answer(socket, &json!({"op": "state"})).await?;
    let gpus = state["state"]["changes"]["gpus"].as_object();
    let limits = gpus
        .into_iter()
        .flat_map(|gpus| gpus.values())
        .filter_map(|gpu| gpu["limits"].as_object());
    let limits = limits.flatten().filter(|(cgroup, _)| Path::new(cgroup).is_dir());
    let hard = |limit: &Value| {
        limit["hard"]
            .as_u64()
            .ok_or_else(|| io::Error::other(format!("a limit is {limit}")))
    };
    limits.map(|(cgroup, limit)| Ok((cgroup.clone(), hard(limit)?))).collect()
}

async fn answer(socket: &Path, request: &Value) -> io::Result<Value> {
    let mut stream = BufReader::new(UnixStream::connect(socket).await?);
    stream.write_all(format!("{request}\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    let answer: Value = serde_json::from_str(&answer)?;
    match answer.get("err") {
        None => Ok(answer),
        Some(error) => Err(io::Error::other(format!("the simulated NVML refused {request}: {error}"))),
    }
}

/// Divide a GPU into MIG devices of these profiles (`NVML_GPU_INSTANCE_PROFILE_…`), as `nvidia-smi mig -cgi … -C` does, or switch MIG off.
/// The kernel module's files are those that [`mig_files`] names.
pub async fn divide(socket: &Path, gpu: u32, profiles: Option<&[u32]>) -> io::Result<()> {
    let instances = profiles.map(|profiles| {
        let device = |(gi, profile)| json!({"gpu_instance": gi, "compute_instance": 0, "profile": profile});
        (1_u32..).zip(profiles).map(device).collect::<Vec<_>>()
    });
    ask(socket, &json!({"op": "mig", "gpu": gpu, "devices": instances})).await
}

/// The files of NVIDIA's kernel module that describe the MIG devices of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MigFiles {
    /// The content of `/proc/driver/nvidia-caps/mig-minors`.
    pub minors: String,
    /// The directories below `/proc/driver/nvidia/capabilities`, such as `gpu0/mig/gi1/ci0`.
    pub directories: Vec<String>,
    /// The minor numbers of `/dev/nvidia-caps/nvidia-cap<minor>`.
    pub nodes: Vec<u32>,
}

/// Return the kernel module's files for the GPUs with these minor numbers, if each is divided into `count` MIG devices by [`divide`].
pub fn mig_files(gpus: &[u32], count: usize) -> MigFiles {
    let mut files = MigFiles::default();
    // The minors 1 and 2 are those of the MIG configuration and the monitor.
    let mut next = 3;
    for gpu in gpus {
        for gi in 1..=count {
            let (of_gi, of_ci) = (next, next + 1);
            files.minors += &format!("gpu{gpu}/gi{gi}/access {of_gi}\ngpu{gpu}/gi{gi}/ci0/access {of_ci}\n");
            files.directories.push(format!("gpu{gpu}/mig/gi{gi}/ci0"));
            files.nodes.extend([of_gi, of_ci]);
            next += 2;
        }
    }
    files
}

/// Return the names of a directory's entries, or none if the directory does not exist.
pub fn names(directory: &Path) -> io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries?,
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

/// Return the names of the grants' specs in a CDI directory. The specs of the driver, the agent's and that of `nvidia-device-plugin`, are
/// omitted because they belong to no grant.
pub fn grant_specs(directory: &Path) -> io::Result<Vec<String>> {
    let mut found = names(directory)?;
    found.retain(|name| {
        !["divvy.dev-driver_", "k8s.device-plugin.nvidia.com-"]
            .iter()
            .any(|prefix| name.starts_with(prefix))
    });
    Ok(found)
}

/// The files that are installed as a driver's libraries.
#[derive(Debug, Clone, Copy)]
pub struct InstalledLibraries<'a> {
    /// `libcuda.so`.
    pub cuda: &'a Path,
    /// `libnvidia-ml.so`.
    pub nvml: &'a Path,
}

/// Write the libraries of a driver below `root`, as a distribution's package does. Without `libraries` they are empty files, which is enough where no
/// program loads them.
pub fn install(root: &Path, version: &str, libraries: Option<InstalledLibraries<'_>>) -> io::Result<()> {
    let directory = root.join("usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(&directory)?;
    let (cuda, nvml) = (libraries.map(|of| of.cuda), libraries.map(|of| of.nvml));
    for (library, content) in [("libcuda.so", cuda), ("libnvidia-ml.so", nvml)] {
        let file = format!("{library}.{version}");
        match content {
            Some(content) => std::fs::copy(content, directory.join(&file)).map(drop)?,
            None => std::fs::write(directory.join(&file), "")?,
        }
        std::os::unix::fs::symlink(file, directory.join(format!("{library}.1")))?;
    }
    Ok(())
}

/// Write a file below `root` by its path on the machine, or remove it if `content` is `None`.
pub fn place(root: &Path, path: &str, content: Option<&[u8]>) -> io::Result<()> {
    let path = root.join(path.trim_start_matches('/'));
    match content {
        Some(content) => std::fs::write(path, content),
        None => std::fs::remove_file(path),
    }
}
