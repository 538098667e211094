//! Running cargo.

use std::ffi::OsString;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

/// Run cargo. Fail if cargo fails.
pub(crate) fn cargo(args: &[&str]) -> Result<()> {
    run_cargo(Command::new(program()).args(args))
}

/// Run a command of cargo. Fail if it fails.
pub(crate) fn run_cargo(command: &mut Command) -> Result<()> {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let words = words.join(" ");
    let status = command.status().with_context(|| format!("cargo {words} could not be run"))?;
    ensure!(status.success(), "cargo {words} failed");
    Ok(())
}

pub(crate) fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}
