//! The packages.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};

use crate::debian::{find, unpack};

/// A branch of the driver: its name, the suite of Debian that has it, and the packages of libcuda, NVML, and nvidia-smi, then of the control program of MPS.
pub(crate) struct Branch {
    pub(crate) name: &'static str,
    suite: &'static str,
    packages: &'static [&'static str],
}

const CURRENT: &[&str] = &["libcuda1", "libnvidia-ml1", "nvidia-smi", "nvidia-cuda-mps"];

pub(crate) const BRANCHES: [Branch; 6] = [
    Branch {
        name: "450",
        suite: "bullseye",
        packages: &["libnvidia-tesla-450-cuda1", "libnvidia-tesla-450-ml1", "nvidia-tesla-450-smi"],
    },
    Branch {
        name: "470",
        suite: "bookworm",
        packages: &["libnvidia-tesla-470-cuda1", "libnvidia-tesla-470-ml1", "nvidia-tesla-470-smi"],
    },
    Branch {
        name: "525",
        suite: "bookworm",
        packages: &["libnvidia-tesla-cuda1", "libnvidia-tesla-ml1", "nvidia-tesla-smi"],
    },
    Branch {
        name: "535",
        suite: "bookworm",
        packages: CURRENT,
    },
    Branch {
        name: "550",
        suite: "trixie",
        packages: CURRENT,
    },
    Branch {
        name: "555",
        suite: "experimental",
        packages: CURRENT,
    },
];

/// The files of a driver.
#[derive(Debug)]
pub(crate) struct PackagedDriver {
    pub(crate) branch: &'static str,
    /// Such as `535.261.03`.
    pub(crate) version: String,
    /// The directory that has the packages' files.
    pub(crate) root: PathBuf,
    pub(crate) cuda: PathBuf,
    pub(crate) nvml: PathBuf,
    pub(crate) smi: PathBuf,
}

impl PackagedDriver {
    pub(crate) fn download(branch: &Branch, directory: &Path) -> Result<PackagedDriver> {
        let root = unpack(directory, branch.name, branch.suite, branch.packages)?;
        let library = |stem: &str| {
            let is_it = |name: &str| name.strip_prefix(stem).is_some_and(|version| version.contains('.'));
            find(&root, &is_it).with_context(|| format!("the packages of {} have no {stem}VERSION", branch.name))
        };
        let (cuda, nvml) = (library("libcuda.so.")?, library("libnvidia-ml.so.")?);
        let smi = find(&root.join("usr/lib"), &|name| name == "nvidia-smi");
        let version = cuda
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .replace("libcuda.so.", "");
        Ok(PackagedDriver {
            branch: branch.name,
            version,
            smi: smi.with_context(|| format!("the packages of {} have no nvidia-smi", branch.name))?,
            root,
            cuda,
            nvml,
        })
    }

    /// The directory that has its libraries.
    pub(crate) fn libraries(&self) -> &Path {
        self.cuda.parent().unwrap_or(&self.root)
    }
}
