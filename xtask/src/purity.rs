//! `cargo xtask purity`: a check of dependencies. The crates whose decisions are pure functions must not depend on tokio, kube, libloading, and the
//! like, not even indirectly, so that they cannot do I/O. The small programs for containers must not depend on them either.

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use anyhow::{Context as _, Result, ensure};

const PURE: [&str; 22] = [
    "divvy-model",
    "divvy-share",
    "divvy-agent-core",
    "divvy-labels",
    "divvy-nvidia-config",
    "divvy-nvidia-plugin",
    "divvy-placement",
    "divvy-policy",
    "divvy-audit",
    "divvy-simulator",
    "divvy-smi",
    "divvy-smoke-report",
    "divvy-cdi",
    "divvy-oci",
    "divvy-engines",
    "divvy-doctor",
    "divvy-why",
    "divvy-smoke-run",
    "divvy-exposition",
    "divvy-view",
    "divvy-top",
    "divvy-page",
];
/// Programs that containers wait for. They may do I/O, but must stay small and fast, so the same dependencies are forbidden.
const SMALL: [&str; 2] = ["divvy-runtime", "divvy-hook"];
const IMPURE: [&str; 8] = ["tokio", "kube", "libloading", "hyper", "axum", "tonic", "rand", "notify"];

/// Check the direct and indirect dependencies of the pure crates.
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
        ensure!(reached.contains(package), "cargo tree does not list {package}");
        let wrong: Vec<&&str> = IMPURE.iter().filter(|name| reached.contains(**name)).collect();
        ensure!(
            wrong.is_empty(),
            "{package} must not depend on {wrong:?}; find the path with `cargo tree -p {package} -i NAME`"
        );
    }
    kubelet_stands_alone()
}

/// Check that `divvy-kubelet` depends on no other crate of this workspace: it is for any device plugin and knows nothing about GPUs.
fn kubelet_stands_alone() -> Result<()> {
    let manifest = std::fs::read_to_string("crates/divvy-kubelet/Cargo.toml")?;
    let ours: BTreeMap<usize, &str> = manifest
        .lines()
        .enumerate()
        .filter(|(_, line)| line.starts_with("divvy-"))
        .collect();
    ensure!(
        ours.is_empty(),
        "divvy-kubelet must not depend on other crates of this workspace, but depends on {ours:?}"
    );
    Ok(())
}
