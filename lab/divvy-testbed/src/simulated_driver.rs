//! A machine's simulated driver, and the directories in which the driver and the agent keep files.

use std::io;
use std::path::Path;

use serde_json::Value;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixStream;

/// Send one request to the control socket of a simulated NVML library.
pub async fn ask(socket: &Path, request: &Value) -> io::Result<()> {
    let mut stream = BufReader::new(UnixStream::connect(socket).await?);
    stream.write_all(format!("{request}\n").as_bytes()).await?;
    let mut answer = String::new();
    stream.read_line(&mut answer).await?;
    let answer: Value = serde_json::from_str(&answer)?;
    match answer.get("err") {
        None => Ok(()),
        Some(error) => Err(io::Error::other(format!("the simulated NVML refused {request}: {error}"))),
    }
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

/// Return the names of the grants' specs in a CDI directory. The agent's spec of the driver is omitted because it belongs to no grant.
pub fn grant_specs(directory: &Path) -> io::Result<Vec<String>> {
    let mut found = names(directory)?;
    found.retain(|name| !name.starts_with("divvy.dev-driver_"));
    Ok(found)
}

/// Write the libraries of a driver below `root`, as a distribution's package does.
pub fn install(root: &Path, version: &str) -> io::Result<()> {
    let directory = root.join("usr/lib/x86_64-linux-gnu");
    std::fs::create_dir_all(&directory)?;
    for library in ["libcuda.so", "libnvidia-ml.so"] {
        let file = format!("{library}.{version}");
        std::fs::write(directory.join(&file), "")?;
        std::os::unix::fs::symlink(file, directory.join(format!("{library}.1")))?;
    }
    Ok(())
}

/// Write a file below `root` by its path on the machine, or remove it if `text` is `None`.
pub fn place(root: &Path, path: &str, text: Option<&str>) -> io::Result<()> {
    let path = root.join(path.trim_start_matches('/'));
    match text {
        Some(text) => std::fs::write(path, text),
        None => std::fs::remove_file(path),
    }
}
