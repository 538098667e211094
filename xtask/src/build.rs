//! Building and running what has been built.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::skips;

/// Runs cargo, and fails if it does.
pub(crate) fn cargo(args: &[&str]) -> Result<()> {
    run_cargo(Command::new(program()).args(args))
}

fn run_cargo(command: &mut Command) -> Result<()> {
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    let words = words.join(" ");
    let status = command.status().with_context(|| format!("cargo {words} could not be run"))?;
    ensure!(status.success(), "cargo {words} failed");
    Ok(())
}

fn program() -> OsString {
    std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into())
}

/// `1`: the programs have been built. `.ci/run` builds them together with the tests, and sets this. Built without the tests, many of their
/// dependencies would have other features (kube and k8s-openapi among them): these, and all crates of ours, would be compiled a second time.
const BUILT: &str = "DIVVY_BUILT";

/// All programs of the workspace.
pub(crate) fn programs() -> Result<()> {
    if std::env::var_os(BUILT).is_some_and(|value| value == "1") {
        return Ok(());
    }
    cargo(&["build", "--quiet", "--workspace"])
}

/// All programs, then all tests: tests run the programs. At the end, prints what was skipped.
pub(crate) fn test(args: &[&str]) -> Result<()> {
    // With the tests, so that nothing is compiled twice (see BUILT).
    cargo(&["build", "--quiet", "--workspace", "--all-targets"])?;
    // Without what they take, the test of these programs is skipped, and says so.
    if crate::image::missing().is_none() {
        crate::image::runtime_programs()?;
    }
    let record = skips::Record::begin()?;
    let result = run_cargo(
        Command::new(program())
            .args(["test", "--quiet", "--workspace"])
            .args(args)
            .env(divvy_skip::FILE, record.path()),
    );
    record.print()?;
    result
}

/// Where cargo puts everything.
pub(crate) fn target() -> PathBuf {
    std::env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into()).into()
}

/// Where cargo puts debug builds.
pub(crate) fn debug_folder() -> PathBuf {
    target().join("debug")
}

/// All programs, then the demo; its status is ours.
pub(crate) fn demo(args: &[&str]) -> Result<ExitCode> {
    programs()?;
    let program = debug_folder().join("divvy");
    // Replaced and not started: Ctrl-C and the exit status are the demo's own.
    let error = std::os::unix::process::CommandExt::exec(Command::new(&program).arg("demo").args(args));
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}

/// Random histories; the status is theirs.
pub(crate) fn torture(args: &[&str]) -> Result<ExitCode> {
    programs()?;
    let program = debug_folder().join("divvy-torture");
    let error = std::os::unix::process::CommandExt::exec(Command::new(&program).args(args));
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}
