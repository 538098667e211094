//! The NVIDIA driver of the machine that this program runs on.

use std::fmt::Write as _;
use std::io;
use std::path::{Path, PathBuf};

use serde_json::Value;
use tokio::process::Command;

/// Where installations have the driver's libraries, if `ldconfig` does not say it.
const DIRECTORIES: [&str; 5] = [
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/local/nvidia/lib64",
    "/usr/lib/wsl/lib",
];
/// The names by which programs load the libraries.
const CUDA: &str = "libcuda.so.1";
const NVML: &str = "libnvidia-ml.so.1";

/// The driver's libraries.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RealDriver {
    /// `libcuda.so`, without links.
    pub cuda: PathBuf,
    /// `libnvidia-ml.so`, without links.
    pub nvml: PathBuf,
}

impl RealDriver {
    /// Find the libraries in a directory, or where programs find them.
    ///
    /// # Errors
    /// A library is missing. The error says where it was looked for.
    pub async fn find(directory: Option<&Path>) -> io::Result<RealDriver> {
        if let Some(directory) = directory {
            return Ok(RealDriver {
                cuda: in_directory(directory, CUDA)?,
                nvml: in_directory(directory, NVML)?,
            });
        }
        let listed = Command::new("ldconfig").arg("-p").output().await;
        // A machine without ldconfig has the libraries in one of the directories.
        let listed = listed.map_or_else(
            |_| String::new(),
            |output| String::from_utf8_lossy(&output.stdout).into_owned(),
        );
        Ok(RealDriver {
            cuda: found(CUDA, &listed)?,
            nvml: found(NVML, &listed)?,
        })
    }

    /// Return a description of this machine under a name, from what `divvy-probe --once` prints.
    ///
    /// # Errors
    /// The probe fails, or the driver has no GPU, or one in MIG mode.
    pub async fn describe(&self, probe: &Path, name: &str) -> io::Result<String> {
        let output = Command::new(probe)
            .arg("--once")
            .arg("--nvml-library")
            .arg(&self.nvml)
            .output()
            .await?;
        if !output.status.success() {
            let text = String::from_utf8_lossy(&output.stderr);
            return Err(io::Error::other(format!("the driver cannot be used: {}", text.trim_end())));
        }
        described(&serde_json::from_slice(&output.stdout)?, name).map_err(io::Error::other)
    }
}

fn in_directory(directory: &Path, name: &str) -> io::Result<PathBuf> {
    let path = directory.join(name);
    path.canonicalize().map_err(|error| {
        let text = format!(
            "{} is not there ({error}); --driver names the directory of the driver's libraries",
            path.display()
        );
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

/// Return the path of a library from what `ldconfig -p` printed, or from the usual directories.
fn found(name: &str, listed: &str) -> io::Result<PathBuf> {
    let lines = listed.lines().filter(|line| {
        let is_ours = line.contains("x86-64") || line.contains("AArch64");
        is_ours && line.trim_start().split(' ').next() == Some(name)
    });
    let listed = lines
        .filter_map(|line| line.split_once("=> "))
        .map(|(_, path)| PathBuf::from(path));
    let usual = DIRECTORIES.iter().map(|directory| Path::new(directory).join(name));
    let path = listed.chain(usual).find_map(|path| path.canonicalize().ok());
    path.ok_or_else(|| {
        let text = format!(
            "this machine has no {name}, so it has no NVIDIA driver: it is neither in the list of `ldconfig -p` nor in {}. Run this on a machine with an \
             NVIDIA GPU, name the directory of the driver's libraries with --driver, or use the simulated driver: leave out --gpus real",
            DIRECTORIES.join(", ")
        );
        io::Error::new(io::ErrorKind::NotFound, text)
    })
}

/// Why what the probe found cannot be described.
#[derive(Debug, thiserror::Error)]
enum Indescribable {
    #[error("the probe did not say {key}: {of}")]
    Unsaid { key: &'static str, of: Value },
    #[error("the driver {0} has no GPU")]
    NoGpu(String),
    #[error("{0} is in MIG mode; `nvidia-smi -mig 0` ends that, if nothing uses the GPU")]
    Mig(String),
    #[error("the probe did not say how much memory {0} has")]
    NoMemory(String),
}

/// Return a machine description (`divvy_model::machine`) of what the probe found.
fn described(probe: &Value, name: &str) -> Result<String, Indescribable> {
    let text = |of: &Value, key: &'static str| {
        let found = of[key].as_str().map(str::to_owned);
        found.ok_or_else(|| Indescribable::Unsaid { key, of: of.clone() })
    };
    let driver = text(&probe["drivers"]["nvidia"], "version")?;
    let mut description = format!("v = 1\n[[node]]\nname = {name:?}\ndriver = {driver:?}\n");
    let gpus = probe["gpus"].as_array().into_iter().flatten();
    let mut gpus = gpus.filter(|gpu| gpu["vendor"] == "nvidia").peekable();
    if gpus.peek().is_none() {
        return Err(Indescribable::NoGpu(driver));
    }
    for gpu in gpus {
        let (uuid, model) = (text(gpu, "uuid")?, text(gpu, "model")?);
        if !gpu["mig"].is_null() {
            return Err(Indescribable::Mig(uuid));
        }
        let memory = gpu["totalMiB"]
            .as_u64()
            .ok_or_else(|| Indescribable::NoMemory(uuid.clone()))?;
        let _ = write!(
            description,
            "[[node.gpu]]\nmodel = {model:?}\nuuid = {uuid:?}\nmemory_mib = {memory}\n"
        );
        if let Some(minor) = gpu["minor"].as_u64() {
            let _ = writeln!(description, "minor = {minor}");
        }
    }
    Ok(description)
}

#[cfg(test)]
mod tests {
    use divvy_model::machine::Machines;
    use serde_json::json;

    use super::*;

    /// A library of another architecture is not found.
    #[test]
    fn a_library_is_found_in_the_loaders_list() {
        let own = std::env::current_exe().expect("there");
        let list = format!(
            "3 libs found\n\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1\n\tlibcuda.so.1 (libc6,x86-64) => {0}\n\tlibcuda.so.12 (libc6,x86-64) => /x\n",
            own.display()
        );
        assert_eq!(found("libcuda.so.1", &list).ok(), own.canonicalize().ok());
        let error = found("libdivvy-none.so.1", &list).expect_err("none").to_string();
        assert!(error.contains("no NVIDIA driver") && error.contains("--driver"), "{error}");
    }

    /// A GPU in MIG mode is refused.
    #[test]
    fn the_machine_is_described_with_all_gpus() {
        let gpu = |uuid: &str, mig: Value| json!({"vendor": "nvidia", "uuid": uuid, "model": "NVIDIA \"H100\"", "totalMiB": 81559, "minor": 3, "mig": mig});
        let probe = |gpus: Vec<Value>| json!({"drivers": {"nvidia": {"version": "580.159.03"}}, "gpus": gpus});
        let text = described(&probe(vec![gpu("GPU-1", Value::Null), gpu("GPU-2", Value::Null)]), "here").expect("described");
        let machines = Machines::parse(&text).expect("valid");
        let node = machines.node("here").expect("there");
        assert_eq!((node.driver.as_str(), node.gpus.len()), ("580.159.03", 2));
        assert_eq!(node.gpus[1].uuid.as_deref(), Some("GPU-2"));
        assert_eq!((node.gpus[0].memory_mib, node.gpus[0].minor), (81559, Some(3)));
        for (gpus, part) in [
            (vec![], "has no GPU"),
            (vec![gpu("GPU-1", json!([]))], "GPU-1 is in MIG mode"),
        ] {
            let error = described(&probe(gpus), "here").expect_err("refused").to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
