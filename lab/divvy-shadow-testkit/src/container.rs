//! The files of a container that has the guard.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::{FileExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use divvy_share::limits::ShareLimits;
use divvy_share::usage;
use tempfile::TempDir;

use crate::{replace, shadow};

pub const MIB: u64 = 1 << 20;
/// What a context takes on the simulated GPUs.
pub const CONTEXT: u64 = 300 * MIB;
/// The first GPUs of the machine.
pub const GPUS: [&str; 3] = [
    "GPU-00010203-0405-4607-8809-0a0b0c0d0e0f",
    "GPU-10111213-1415-4617-8819-1a1b1c1d1e1f",
    "GPU-20212223-2425-4627-8829-2a2b2c2d2e2f",
];
/// Where a container has the driver's own libraries. The guard's libraries have this path as often as they need one of them.
const REAL: &str = "/run/divvy/guard";

/// What a container has, without a container: the files are in a temporary directory.
#[derive(Debug)]
pub struct ShadowContainer {
    directory: TempDir,
}

impl ShadowContainer {
    /// Make the directory, whose name begins with this letter. Its path is as long as those that it replaces in the guard's libraries.
    pub fn new(letter: &str) -> Self {
        let length = divvy_share::DIRECTORY.len() - "/tmp/".len() - letter.len();
        let mut builder = tempfile::Builder::new();
        let directory = builder.prefix(letter).rand_bytes(length).tempdir_in("/tmp").unwrap();
        let container = Self { directory };
        fs::create_dir(container.path("ledger")).unwrap();
        container
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A file of the share of a GPU.
    pub fn file(&self, gpu: usize, name: &str) -> PathBuf {
        self.path(GPUS[gpu]).join(name)
    }

    /// Put a library here, in which each of these paths is there so often, and becomes that of this directory.
    pub fn install(&self, library: &[u8], name: &str, paths: &[&str], times: usize) {
        let (mut library, root) = (library.to_vec(), self.directory.path().to_str().unwrap());
        for path in paths {
            assert_eq!(replace(&mut library, path, root), times, "{name}: {path}");
        }
        fs::write(self.path(name), library).unwrap();
    }

    /// Put a library of the guard, from a package, in front of one of the driver: `name` is that of the driver's library without its version.
    pub fn put_guard(&self, package: &str, name: &str, driver: &Path) {
        let paths = [divvy_share::DIRECTORY, REAL];
        self.install(shadow(package), &format!("{name}.1"), &paths, 1);
        symlink(driver, self.path(&format!("{name}.real"))).unwrap();
    }

    /// Describe the machine to the simulated driver: the driver's version, the memory of each GPU, and more lines for each of the GPUs that it has.
    pub fn describe_machine(&self, driver: &str, memory: u64, gpus: &[&str]) {
        let gpus = GPUS.iter().zip(gpus).map(|(uuid, more)| {
            format!(
                "[[node.gpu]]\nmodel = \"NVIDIA A100-SXM4-40GB\"\nuuid = \"{uuid}\"\nmemory_mib = {}\ncontext_mib = {}\n{more}",
                memory / MIB,
                CONTEXT / MIB
            )
        });
        let gpus: String = gpus.collect();
        let machine = format!("v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"{driver}\"\n{gpus}");
        fs::write(self.path("machine.toml"), machine).unwrap();
    }

    /// Make the two files of a share.
    pub fn give(&self, gpu: usize, limits: &ShareLimits) {
        fs::create_dir_all(self.path(GPUS[gpu])).unwrap();
        fs::write(self.file(gpu, "limits"), limits.file()).unwrap();
        fs::write(self.file(gpu, "usage"), usage::file()).unwrap();
    }

    /// Change the limits of the first GPU, as the agent does. Return the generation.
    pub fn change(&self, limits: &ShareLimits) -> u64 {
        let path = self.file(0, "limits");
        let (generation, _) = ShareLimits::from_bytes(&fs::read(&path).unwrap()).unwrap();
        let (offset, copy) = limits.copy(generation + 1);
        let file = fs::File::options().write(true).open(path).unwrap();
        file.write_all_at(&copy, offset).unwrap();
        generation + 1
    }

    /// A command on this machine.
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command
            .env("DIVVY_NVML_SIM", self.path("machine.toml"))
            .env("DIVVY_NVML_SIM_LEDGER", self.path("ledger"));
        command
    }
}

/// The limits of a pod with this share.
pub fn limits(share: u64) -> ShareLimits {
    ShareLimits {
        bytes: share,
        context: CONTEXT,
        ..ShareLimits::default()
    }
}
