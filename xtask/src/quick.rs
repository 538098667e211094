//! `cargo xtask quick`: the checks that a change needs most often, in less than a minute when everything else is built.

use std::time::Instant;

use anyhow::Result;

use crate::cargo::cargo;
use crate::{cycles, prose, purity, unused};

/// The pure crates: their tests need neither a cluster nor other programs.
const PURE_TESTS: [&str; 8] = [
    "divvy-model",
    "divvy-placement",
    "divvy-policy",
    "divvy-audit",
    "divvy-agent-core",
    "divvy-why",
    "divvy-cdi",
    "divvy-oci",
];

pub(crate) fn run() -> Result<()> {
    step("format", || cargo(&["fmt", "--all", "--check"]))?;
    step("prose", prose::check)?;
    step("purity", || {
        purity::check()?;
        cycles::check()?;
        unused::check()
    })?;
    step("clippy", || {
        cargo(&["clippy", "--quiet", "--workspace", "--all-targets", "--", "-D", "warnings"])
    })?;
    let packages: Vec<&str> = PURE_TESTS.iter().flat_map(|name| ["--package", *name]).collect();
    step("tests of the pure crates", || {
        cargo(&[&["test", "--quiet"], &packages[..]].concat())
    })
}

#[expect(clippy::print_stdout, reason = "the result of the task")]
fn step(name: &str, work: impl FnOnce() -> Result<()>) -> Result<()> {
    let began = Instant::now();
    work()?;
    println!("ok  {name} ({:.1} s)", began.elapsed().as_secs_f64());
    Ok(())
}
