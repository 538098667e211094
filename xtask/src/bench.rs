//! `cargo xtask bench`: measurements with `lab/divvy-bench`.

use std::os::unix::process::CommandExt as _;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result};

/// Build the measured programs in release mode and the benchmark, then replace this process with the benchmark.
pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    crate::cargo::cargo(&["build", "--quiet", "--release", "-p", "divvy", "-p", "divvy-bench"])?;
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let program = PathBuf::from(target).join("release/divvy-bench");
    let error = Command::new(&program).args(args).exec();
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}
