//! Nothing pure may reach tokio, kube or libloading: the crates whose decisions are functions of values must not be able to do
//! anything else. Nor may the small programs for containers.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

const PURE: [&str; 11] = [
    "divvy-model",
    "divvy-agent-core",
    "divvy-placement",
    "divvy-policy",
    "divvy-audit",
    "divvy-simulator",
    "divvy-cdi",
    "divvy-oci",
    "divvy-engines",
    "divvy-doctor",
    "divvy-why",
];
/// Programs that containers wait for: they may do I/O, and have no place for these either.
const SMALL: [&str; 2] = ["divvy-runtime", "divvy-hook"];
const IMPURE: [&str; 8] = ["tokio", "kube", "libloading", "hyper", "axum", "tonic", "rand", "notify"];

/// Looks at what the pure crates depend on, directly or not.
pub(crate) fn check() -> Result<()> {
    for package in PURE.into_iter().chain(SMALL) {
        let output = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
            .args([
                "tree",
                "--package",
                package,
                "--edges",
                "normal",
                "--prefix",
                "none",
                "--format",
                "{p}",
            ])
            .output()
            .context("cargo tree could not be run")?;
        ensure!(
            output.status.success(),
            "cargo tree failed: {}",
            String::from_utf8_lossy(&output.stderr)
        );
        let text = String::from_utf8(output.stdout)?;
        let reached: BTreeSet<&str> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
        ensure!(reached.contains(package), "cargo tree says nothing of {package}");
        let wrong: Vec<&&str> = IMPURE.iter().filter(|name| reached.contains(**name)).collect();
        ensure!(
            wrong.is_empty(),
            "{package} must do without {wrong:?}, and reaches them; see `cargo tree -p {package} -i NAME`"
        );
    }
    kubelet_stands_alone()
}

/// `divvy-kubelet` is for any device plugin: it knows nothing of GPUs and of no other crate of ours.
fn kubelet_stands_alone() -> Result<()> {
    let manifest = std::fs::read_to_string("crates/divvy-kubelet/Cargo.toml")?;
    let ours: BTreeMap<usize, &str> = manifest
        .lines()
        .enumerate()
        .filter(|(_, line)| line.starts_with("divvy-"))
        .collect();
    ensure!(ours.is_empty(), "divvy-kubelet must stand alone and depends on {ours:?}");
    Ok(())
}
