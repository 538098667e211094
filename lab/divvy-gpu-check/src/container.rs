//! What a container with the guard has, in a directory: the guard's libraries, links to the driver's own, and the pod's share.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};
use divvy_shadow_testkit::replace;

use crate::driver::CheckedDriver;
use crate::pack::Pack;

/// Where a container has the driver's own libraries. The guard's libraries need them by this path.
const REAL: &str = "/run/divvy/guard";
/// The names by which programs load the libraries, each with the guard's file.
const LIBRARIES: [(&str, &str); 2] = [
    ("libcuda.so", "libdivvy-guard.so"),
    ("libnvidia-ml.so", "libdivvy-guard-nvml.so"),
];

/// The directory. It is removed when this value is dropped.
#[derive(Debug)]
pub(crate) struct GpuCheckContainer {
    directory: tempfile::TempDir,
}

impl GpuCheckContainer {
    /// Make it. `share` is the directory of the pod's files, which has one directory for each GPU.
    pub(crate) fn new(pack: &Pack, driver: &CheckedDriver, share: &Path) -> Result<GpuCheckContainer> {
        let root = divvy_share::DIRECTORY;
        ensure!(root.len() == REAL.len(), "{root} and {REAL} have different lengths");
        // As long as the path that it replaces.
        let mut builder = tempfile::Builder::new();
        let random = root.len() - "/tmp/g".len();
        let directory = builder.prefix("g").rand_bytes(random).tempdir_in("/tmp");
        let directory = directory.context("no directory for a container")?;
        let path = directory.path().to_str().context("a path is not UTF-8")?;
        for (name, guard) in LIBRARIES {
            let mut library = fs::read(pack.file(guard)?)?;
            for text in [root, REAL] {
                let times = replace(&mut library, text, path);
                ensure!(times == 1, "{guard} has the path {text} {times} times, and not once");
            }
            let versioned = format!("{name}.1");
            fs::write(directory.path().join(&versioned), library)?;
            symlink(&versioned, directory.path().join(name))?;
        }
        symlink(&driver.cuda, directory.path().join("libcuda.so.real"))?;
        symlink(&driver.nvml, directory.path().join("libnvidia-ml.so.real"))?;
        let gpu = &driver.gpu().uuid;
        symlink(share.join(gpu), directory.path().join(gpu))?;
        Ok(GpuCheckContainer { directory })
    }

    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Return the path of CUDA's library with the guard.
    pub(crate) fn cuda(&self) -> PathBuf {
        self.path().join("libcuda.so.1")
    }

    /// Return the path of NVML with the guard.
    pub(crate) fn nvml(&self) -> PathBuf {
        self.path().join("libnvidia-ml.so.1")
    }

    /// Return the path of the driver's own library of CUDA.
    pub(crate) fn real_cuda(&self) -> PathBuf {
        self.path().join("libcuda.so.real")
    }
}
