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

/// The environment variable that says, with the value `1`, that the programs have been built. `.ci/run` builds them together with the tests and
/// then sets it. Building the programs without the tests would select other features of many dependencies, such as kube and k8s-openapi, and
/// compile these and all crates of this workspace a second time.
const BUILT: &str = "DIVVY_BUILT";

/// Build all programs of the workspace.
pub(crate) fn build_workspace() -> Result<()> {
    if is_built() {
        return Ok(());
    }
    cargo(&["build", "--quiet", "--workspace"])
}

/// Report whether all programs have been built with the tests.
pub(crate) fn is_built() -> bool {
    std::env::var_os(BUILT).is_some_and(|value| value == "1")
}
