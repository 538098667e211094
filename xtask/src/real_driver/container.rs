//! Programs that see other files than this machine's, and have a `/dev` of their own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use anyhow::{Context as _, Result, ensure};

use super::DriverBench;

/// Where the container has libraries.
pub(crate) const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Report what is missing here for a container.
pub(crate) fn possible(contain: &Path) -> Result<()> {
    let output = Command::new(contain).arg("--check").output();
    let output = output.with_context(|| format!("{} could not be started", contain.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(())
}

/// A program to run in a container that has this machine's files, and others in their place.
pub(crate) struct BenchContainer<'b> {
    bench: &'b DriverBench,
    mounts: Vec<(PathBuf, PathBuf)>,
    variables: Vec<(&'static str, PathBuf)>,
}

impl<'b> BenchContainer<'b> {
    pub(crate) fn new(bench: &'b DriverBench) -> BenchContainer<'b> {
        BenchContainer {
            bench,
            mounts: vec![(bench.packages.clone(), bench.packages.clone())],
            variables: Vec::new(),
        }
    }

    /// Have a file of the machine at a path of the container.
    pub(crate) fn mount(mut self, file: &Path, path: impl Into<PathBuf>) -> BenchContainer<'b> {
        self.mounts.push((file.to_owned(), path.into()));
        self
    }

    pub(crate) fn set(mut self, name: &'static str, value: impl Into<PathBuf>) -> BenchContainer<'b> {
        self.variables.push((name, value.into()));
        self
    }

    /// Run a program, and return what it prints and its status.
    pub(crate) fn run(&self, program: &Path, arguments: &[&str]) -> Result<Output> {
        let root = self.bench.work.join("root");
        std::fs::create_dir_all(&root).with_context(|| format!("{} could not be created", root.display()))?;
        let mut command = Command::new(self.bench.built("divvy-contain")?);
        command.args(["--image", "/"]);
        for (file, path) in &self.mounts {
            command.arg("--read-only").arg(file).arg(path);
        }
        command.arg("--mount").arg(&self.bench.work).arg(&self.bench.work);
        command.arg(&root).arg(program).args(arguments);
        command.envs(self.variables.iter().map(|(name, value)| (*name, value)));
        command
            .output()
            .with_context(|| format!("{} could not be started", program.display()))
    }

    /// The same for a program that must succeed.
    pub(crate) fn text(&self, program: &Path, arguments: &[&str]) -> Result<String> {
        let output = self.run(program, arguments)?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let said = || [&output.stdout, &output.stderr].map(|said| text(said)).concat();
        ensure!(output.status.success(), "{} failed: {}", program.display(), said());
        Ok(text(&output.stdout))
    }
}
