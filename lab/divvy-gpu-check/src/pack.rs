//! The built programs, in the directory of this one.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use tokio::process::Command;

/// The directory of a C library, for machines whose own is older than the one that the programs were built with.
const CARRIED: &str = "lib";
/// The dynamic loader in it.
const LOADER: &str = "loader";

/// The built programs.
#[derive(Debug, Clone)]
pub(crate) struct Pack {
    pub(crate) directory: PathBuf,
    /// Whether the programs start with the machine's own C library.
    native: bool,
}

impl Pack {
    /// Find the programs next to this one, and how they start on this machine.
    pub(crate) async fn beside(own: &Path) -> Result<Pack> {
        let directory = own.parent().unwrap_or(Path::new(".")).to_owned();
        let mut pack = Pack { directory, native: true };
        let needed = [
            "divvy-agent",
            "divvy-probe",
            "divvy-cuda-program",
            "divvy-smoke",
            "libdivvy-guard.so",
            "libdivvy-guard-nvml.so",
        ];
        for name in needed {
            pack.file(name)?;
        }
        let native = pack.starts().await;
        if let Err(error) = native {
            pack.native = false;
            let carried = pack.starts().await;
            carried.with_context(|| {
                format!("divvy-probe starts neither with the machine's C library ({error:#}) nor with its own")
            })?;
        }
        Ok(pack)
    }

    async fn starts(&self) -> Result<()> {
        let output = self.command("divvy-probe")?.arg("--version").output().await;
        let output = output.context("divvy-probe could not be run")?;
        if !output.status.success() {
            bail!("{}", String::from_utf8_lossy(&output.stderr).trim());
        }
        Ok(())
    }

    /// Report whether the programs start with the machine's own C library.
    pub(crate) fn is_native(&self) -> bool {
        self.native
    }

    /// Say which C library the programs run with.
    pub(crate) fn c_library(&self) -> &'static str {
        if self.native {
            "the machine's"
        } else {
            "the one that was carried here, because the machine's is too old"
        }
    }

    /// Return the path of a file.
    pub(crate) fn file(&self, name: &str) -> Result<PathBuf> {
        let path = self.directory.join(name);
        if path.is_file() {
            return Ok(path);
        }
        bail!(
            "{name} is missing in {}; `cargo xtask gpu pack` builds a directory with all programs",
            self.directory.display()
        )
    }

    /// Return the words that start a program that is linked to the C library.
    pub(crate) fn words(&self, name: &str) -> Result<Vec<PathBuf>> {
        let program = self.file(name)?;
        if self.native {
            return Ok(vec![program]);
        }
        let library = self.directory.join(CARRIED);
        Ok(vec![library.join(LOADER), "--library-path".into(), library, program])
    }

    /// Return the command that starts such a program.
    pub(crate) fn command(&self, name: &str) -> Result<Command> {
        let words = self.words(name)?;
        let (first, rest) = words.split_first().context("a command has words")?;
        let mut command = Command::new(first);
        command.args(rest);
        Ok(command)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// A directory of programs that are scripts.
    fn directory(probe: &str) -> tempfile::TempDir {
        let directory = tempfile::tempdir().expect("a directory");
        std::fs::create_dir(directory.path().join(CARRIED)).expect("made");
        let write = |name: &str, script: &str| {
            let path = directory.path().join(name);
            std::fs::write(&path, script).expect("written");
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).expect("set");
        };
        for name in [
            "divvy-agent",
            "divvy-cuda-program",
            "divvy-smoke",
            "libdivvy-guard.so",
            "libdivvy-guard-nvml.so",
        ] {
            write(name, "");
        }
        write("divvy-probe", &format!("#!/bin/sh\n{probe}\n"));
        // Takes --library-path and its value, as the dynamic loader does.
        write("lib/loader", "#!/bin/sh\nshift 2\nLOADED=1 exec \"$@\"\n");
        directory
    }

    /// Programs start with the carried library only if they do not start with the machine's library.
    #[tokio::test]
    async fn the_carried_c_library_is_the_second_choice() {
        let beside = async |probe: &str| {
            let directory = directory(probe);
            let pack = Pack::beside(&directory.path().join("divvy-gpu-check")).await;
            pack.map(|pack| pack.native).map_err(|error| format!("{error:#}"))
        };
        assert_eq!(beside("exit 0").await, Ok(true));
        assert_eq!(beside("[ -n \"$LOADED\" ] || exit 1").await, Ok(false));
        let error = beside("echo version GLIBC_2.34 not found >&2; exit 1")
            .await
            .expect_err("neither");
        assert!(
            error.contains("neither with the machine's C library (version GLIBC_2.34 not found)"),
            "{error}"
        );
    }

    #[tokio::test]
    async fn a_missing_program_is_named_with_the_command_that_builds_it() {
        let directory = directory("exit 0");
        std::fs::remove_file(directory.path().join("divvy-agent")).expect("removed");
        let pack = Pack::beside(&directory.path().join("divvy-gpu-check")).await;
        let error = pack.expect_err("missing").to_string();
        assert!(
            error.contains("divvy-agent is missing") && error.contains("cargo xtask gpu pack"),
            "{error}"
        );
    }
}
