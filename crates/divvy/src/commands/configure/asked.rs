//! What engines say of themselves.

use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use divvy_engines::Engine;
use tokio::process::Command;

/// A version is a line; a configuration is put together of files.
const VERSION: Duration = Duration::from_secs(5);
const CONFIGURATION: Duration = Duration::from_secs(30);

/// What containerd says of its version; none where it says nothing.
pub(super) async fn containerd_version(program: Option<&str>) -> Option<String> {
    said(program.unwrap_or("containerd"), &["--version"], VERSION).await.ok()
}

/// An engine's own view of its configuration, as TOML.
pub(super) async fn configuration(engine: Engine, program: Option<&str>) -> anyhow::Result<String> {
    if engine != Engine::Crio {
        return said(program.unwrap_or("containerd"), &["config", "dump"], CONFIGURATION).await;
    }
    match said(program.unwrap_or("crio"), &["status", "config"], CONFIGURATION).await {
        Ok(text) => Ok(text),
        // Before 1.29 it was a program of its own.
        Err(error) => said("crio-status", &["config"], CONFIGURATION)
            .await
            .with_context(|| format!("{error:#}")),
    }
}

async fn said(program: &str, words: &[&str], longest: Duration) -> anyhow::Result<String> {
    let told = || {
        format!(
            "`{program} {}` did not say how the engine is configured: is it there, and does it run? --config-source=file does without it",
            words.join(" ")
        )
    };
    let mut command = Command::new(program);
    command.args(words).kill_on_drop(true).stdin(Stdio::null());
    let output = tokio::time::timeout(longest, command.output())
        .await
        .map_err(|_| anyhow::anyhow!("it took longer than {} s", longest.as_secs()))
        .and_then(|output| Ok(output?))
        .with_context(told)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(anyhow::anyhow!("{said} ({})", output.status)).with_context(told);
    }
    String::from_utf8(output.stdout)
        .context("it is not UTF-8 text")
        .with_context(told)
}
