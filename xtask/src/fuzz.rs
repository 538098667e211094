//! `cargo xtask fuzz`: the fuzz targets with libFuzzer. It builds `divvy-fuzz-guided` with coverage counters in the crates of this workspace, and
//! lets `divvy-fuzz` run it.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, ExitCode};

use anyhow::{Context as _, Result, ensure};

use crate::cargo::cargo;
use crate::target_directory::debug_directory;

/// The environment variable that is set while cargo calls this program in place of rustc.
const AS_RUSTC: &str = "DIVVY_XTASK_AS_RUSTC";

/// The options that `cargo fuzz run --sanitizer none` sets (project.rs of cargo-fuzz), without those for whole programs. SanitizerCoverage is
/// part of LLVM, so a stable rustc can run the pass.
const COUNTERS: [&str; 5] = [
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
];

/// The arguments of the build. They select the same features as the tests, so that most of the build is reused.
const BUILD: [&str; 4] = ["build", "--quiet", "--workspace", "--bin"];

/// Build both programs and replace this process with the fuzzer.
pub(crate) fn run(arguments: &[&str]) -> Result<ExitCode> {
    cargo(&[&BUILD[..], &["divvy-fuzz"]].concat())?;
    let this = std::env::current_exe().context("the path of this program is unknown")?;
    // Only the crates of this workspace are built a second time, because their dependencies have no counters.
    let guided = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(BUILD)
        .args(["divvy-fuzz-guided", "--features", "divvy-fuzz/guided"])
        .env("RUSTC_WORKSPACE_WRAPPER", this)
        .env(AS_RUSTC, "1")
        .status()
        .context("cargo could not be run")?;
    ensure!(
        guided.success(),
        "divvy-fuzz-guided could not be built: libFuzzer is compiled from C++ and needs g++ or clang++; \
         `cargo run -p divvy-fuzz` needs neither, and sees no coverage"
    );
    let programs = debug_directory();
    let error = Command::new(programs.join("divvy-fuzz"))
        .arg("--guided")
        .arg(programs.join("divvy-fuzz-guided"))
        .args(arguments)
        .exec();
    Err(error).context("divvy-fuzz could not be started")
}

/// Report whether cargo calls this program in place of rustc (`RUSTC_WORKSPACE_WRAPPER`).
pub(crate) fn is_rustc() -> bool {
    std::env::var_os(AS_RUSTC).is_some()
}

/// Replace this process with rustc, which the first argument names, and add counters where they are needed.
pub(crate) fn rustc() -> Result<ExitCode> {
    let mut words = std::env::args_os().skip(1);
    let rustc = words.next().context("the first argument must be the path of rustc")?;
    let words: Vec<_> = words.collect();
    let mut command = Command::new(rustc);
    command.args(&words);
    if has_counters(&words.iter().map(|word| word.to_string_lossy()).collect::<Vec<_>>()) {
        command.args(COUNTERS);
    }
    Err(command.exec()).context("rustc could not be started")
}

/// Report whether a crate gets counters: libraries and the fuzzer do. Build scripts and macros run during the build and are linked without
/// libFuzzer, which provides the functions that count.
fn has_counters(words: &[impl AsRef<str>]) -> bool {
    let value = |flag: &str| {
        let at = words.iter().position(|word| word.as_ref() == flag)?;
        Some(words.get(at + 1)?.as_ref())
    };
    matches!(
        (value("--crate-name"), value("--crate-type")),
        (Some(_), Some("lib")) | (Some("divvy_fuzz_guided"), Some("bin"))
    )
}

#[cfg(test)]
mod tests {
    use super::has_counters;

    /// Libraries and the fuzzer have counters.
    #[test]
    fn build_time_programs_have_no_counters() {
        for (line, expected) in [
            (
                "--crate-name divvy_model --edition=2024 src/lib.rs --crate-type lib --emit=dep-info",
                true,
            ),
            (
                "--crate-name divvy_fuzz_guided src/bin/divvy-fuzz-guided.rs --crate-type bin",
                true,
            ),
            ("--crate-name build_script_build build.rs --crate-type bin", false),
            ("--crate-name derive src/lib.rs --crate-type proc-macro", false),
            ("-vV", false),
            (
                "- --crate-name ___ --print=file-names --crate-type bin --crate-type rlib",
                false,
            ),
        ] {
            let words: Vec<&str> = line.split(' ').collect();
            assert_eq!(has_counters(&words), expected, "{line}");
        }
    }
}
