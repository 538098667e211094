//! A program in a container with the driver's libraries, as the container runtime makes it from CDI specs.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result};
use divvy_cdi::Edits;

use crate::driver::CompatDriver;
use crate::outcome::ProgramOutcome;

/// How long a program may take. One that hangs is a result, and not the end of everything.
const SECONDS: &str = "300";
const MACHINE: &str = "/run/divvy-sim/machine.toml";
const LEDGER: &str = "/run/divvy-sim/ledger";

/// Which libraries a container has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ContainerLibraries {
    /// The driver's.
    Driver,
    /// The guard's in the place of the driver's.
    Guard,
}

/// A root file system, and the driver of the node.
pub(crate) struct CompatContainer<'a> {
    pub(crate) image: &'a Path,
    pub(crate) driver: &'a CompatDriver,
}

/// A program with what it needs besides the driver.
#[derive(Debug, Clone)]
pub(crate) struct ProgramRun {
    words: Vec<String>,
    pub(crate) environment: Vec<(&'static str, &'static str)>,
    /// Directories of this machine, and where the container has them.
    mounts: Vec<(PathBuf, &'static str)>,
    /// The directory in which the container has another copy of the driver's libraries.
    pub(crate) copy: Option<&'static str>,
    /// Whether the guard also takes the place of such copies (`--guard both`).
    pub(crate) with_copies: bool,
}

impl ProgramRun {
    pub(crate) fn new(program: &str, arguments: &[&str]) -> ProgramRun {
        let words = [program].into_iter().chain(arguments.iter().copied()).map(str::to_owned);
        ProgramRun {
            words: words.collect(),
            environment: Vec::new(),
            mounts: Vec::new(),
            copy: None,
            with_copies: false,
        }
    }

    pub(crate) fn mount(&mut self, directory: &Path, at: &'static str) {
        self.mounts.push((directory.to_owned(), at));
    }
}

impl CompatContainer<'_> {
    /// Run a program with the driver, and then with the guard.
    pub(crate) fn both(&self, run: &ProgramRun) -> Result<[ProgramOutcome; 2]> {
        Ok([
            self.run(ContainerLibraries::Driver, run)?,
            self.run(ContainerLibraries::Guard, run)?,
        ])
    }

    fn run(&self, libraries: ContainerLibraries, run: &ProgramRun) -> Result<ProgramOutcome> {
        let files = tempfile::tempdir_in(&self.driver.directory)?;
        let place = |name: &str| -> Result<PathBuf> {
            let path = files.path().join(name);
            fs::create_dir(&path)?;
            // The container's users need not be the owner.
            fs::set_permissions(&path, fs::Permissions::from_mode(0o777))?;
            Ok(path)
        };
        let [root, ledger, account, copy] = ["root", "ledger", "account", "copy"].map(place);
        let (root, ledger, account, copy) = (root?, ledger?, account?, copy?);
        let mut edits = self.driver.edits();
        if libraries == ContainerLibraries::Guard {
            self.driver.shadow(&mut edits, &account, run.with_copies)?;
        }
        let mut command = Command::new("timeout");
        command.args(["--kill-after=5", SECONDS]).arg(self.driver.contain());
        command.arg("--image").arg(self.image);
        mounts(&mut command, &edits);
        for (target, path) in CompatDriver::links() {
            command.args(["--link", &target, &path]);
        }
        command.args(["--mount", "/dev", "/dev", "--mount"]).arg(&ledger).arg(LEDGER);
        command
            .arg("--read-only")
            .arg(self.driver.directory.join("machine.toml"))
            .arg(MACHINE);
        for (directory, at) in &run.mounts {
            command.arg("--read-only").arg(directory).arg(at);
        }
        if let Some(at) = run.copy {
            for name in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                fs::copy(self.driver.directory.join(name), copy.join(name))
                    .context("the driver's library could not be copied")?;
            }
            command.arg("--read-only").arg(&copy).arg(at);
        }
        command.arg(&root);
        // What the loader reads in the environment is for the program, and not for this machine's programs that start it.
        command
            .arg("/usr/bin/env")
            .args(&edits.env)
            .args(run.environment.iter().map(|(name, value)| format!("{name}={value}")));
        command.args(&run.words).env_clear().envs([
            ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
            ("HOME", "/tmp"),
            ("DIVVY_NVML_SIM", MACHINE),
            ("DIVVY_NVML_SIM_LEDGER", LEDGER),
            // Third-party programs have kernels that the simulation does not know.
            ("DIVVY_CUDA_SIM_CODE", "unread"),
        ]);
        Ok(ProgramOutcome::of(
            &command
                .output()
                .context("timeout could not be run; it is in the package coreutils")?,
        ))
    }
}

fn mounts(command: &mut Command, edits: &Edits) {
    for mount in &edits.mounts {
        let flag = if mount.options.iter().any(|option| option == "ro") {
            "--read-only"
        } else {
            "--mount"
        };
        command.args([flag, &mount.host_path, &mount.container_path]);
    }
}
