//! Building and running what has been built.

use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

/// Runs cargo, and fails if it does.
pub(crate) fn cargo(args: &[&str]) -> Result<()> {
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(args)
        .status();
    let status = status.with_context(|| format!("cargo {} could not be run", args.join(" ")))?;
    ensure!(status.success(), "cargo {} failed", args.join(" "));
    Ok(())
}

/// All programs, then all tests. The programs first: tests run them.
pub(crate) fn test(args: &[&str]) -> Result<()> {
    cargo(&["build", "--quiet", "--workspace"])?;
    cargo(&[&["test", "--quiet", "--workspace"], args].concat())
}

/// Where cargo puts debug builds.
pub(crate) fn debug_folder() -> PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    PathBuf::from(target).join("debug")
}

/// All programs, then the demo; its status is ours.
pub(crate) fn demo(args: &[&str]) -> Result<ExitCode> {
    cargo(&["build", "--quiet", "--workspace"])?;
    let program = debug_folder().join("divvy");
    // Replaced and not started: Ctrl-C and the exit status are the demo's own.
    let error = std::os::unix::process::CommandExt::exec(Command::new(&program).arg("demo").args(args));
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}
