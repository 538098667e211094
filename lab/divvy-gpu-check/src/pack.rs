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

    /// Say which C library the programs run with.
    pub(crate) fn c_library(&self) -> &'static str {
        match self.native {
            true => "the machine's",
            false => "the one that was carried here, because the machine's is too old",
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
