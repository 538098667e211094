//! Building the workspace and running its programs.

use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::cargo::{build_workspace, cargo, is_built, program, run_cargo};
use crate::machine::TargetMachine;
use crate::skips;
use crate::target_directory::{debug_directory, target};

/// Build all programs, which the tests run, and then run all tests. At the end print the skips.
pub(crate) fn test(args: &[&str]) -> Result<()> {
    // Build the programs together with the tests, so that nothing is compiled twice (see `BUILT` in cargo.rs).
    cargo(&["build", "--quiet", "--workspace", "--all-targets"])?;
    // If a tool for these programs is missing, their test records a skip.
    if crate::image::missing().is_none() {
        crate::image::runtime_programs()?;
    }
    let record = skips::SkipRecord::begin()?;
    let result = run_cargo(
        Command::new(program())
            .args(["test", "--quiet", "--workspace"])
            .args(args)
            .env(divvy_skip::FILE, record.path()),
    );
    record.print()?;
    result
}

/// Build what the demo starts, then replace this process with the demo. Only the scenario with the guard needs other programs, and the guard's libraries as they
/// ship.
pub(crate) fn demo(args: &[&str]) -> Result<ExitCode> {
    if args.iter().any(|arg| ["isolation", "--scenario=isolation"].contains(arg)) {
        build_workspace()?;
        guard()?;
    } else if !is_built() {
        // Only the default members of the workspace, with cargo's progress bar: a new user waits for it.
        cargo(&["build"])?;
    }
    let program = debug_directory().join("divvy");
    // Replace this process, so that Ctrl-C and the exit status are the demo's own.
    let error = std::os::unix::process::CommandExt::exec(Command::new(&program).arg("demo").args(args));
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}

/// Build the guard's libraries as they ship, and put them next to the other programs, under the names that the agent knows.
pub(crate) fn guard() -> Result<()> {
    for (name, built) in crate::image::guard(TargetMachine::own()?)? {
        let next = debug_directory().join(format!("{name}.{}", std::process::id()));
        // At once, because another demo may be reading the library.
        std::fs::copy(&built, &next)
            .and_then(|_| std::fs::rename(&next, debug_directory().join(name)))
            .with_context(|| format!("{} could not be copied", built.display()))?;
    }
    Ok(())
}

/// Build all programs, then replace this process with `divvy-torture`.
pub(crate) fn torture(args: &[&str]) -> Result<ExitCode> {
    build_workspace()?;
    let program = debug_directory().join("divvy-torture");
    let error = std::os::unix::process::CommandExt::exec(Command::new(&program).args(args));
    Err(error).with_context(|| format!("{} could not be run", program.display()))
}

/// Build all programs, and write the references that are generated from them.
pub(crate) fn reference() -> Result<()> {
    build_workspace()?;
    let program = debug_directory().join("divvy-reference");
    let status = Command::new(&program)
        .arg(target().join("man"))
        .status()
        .with_context(|| format!("{} could not be run", program.display()))?;
    ensure!(status.success(), "divvy-reference failed");
    Ok(())
}

/// Play the scenarios for NVIDIA's device plugin and GPU feature discovery to Divvy. Compare the results with the recorded ones
/// of NVIDIA's programs, or with `theirs`.
pub(crate) fn compare(theirs: Option<&str>) -> Result<ExitCode> {
    build_workspace()?;
    let built = |name: &str| debug_directory().join(name);
    let recorded = "lab/divvy-compare/data/nvidia-device-plugin-v0.19.3.json";
    let status = Command::new(built("divvy-compare"))
        .arg("--simulator")
        .arg(built("libdivvy_nvml_sim.so"))
        .arg("compare")
        .arg(built("divvy-agent"))
        .arg(theirs.unwrap_or(recorded))
        .status()
        .context("divvy-compare could not be run")?;
    Ok(if status.success() {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
