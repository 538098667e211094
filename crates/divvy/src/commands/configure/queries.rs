//! Queries to engines for their version and configuration.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use divvy_doctor::facts::programs::last_line;
use divvy_engines::{Configuration, Engine, containerd};
use tokio::process::Command;

/// The time limit for an engine to print its version.
const VERSION: Duration = Duration::from_secs(5);
/// The time limit for an engine to print its configuration, which it merges from several files.
const CONFIGURATION: Duration = Duration::from_secs(30);

/// Return the output of `containerd --version`. `None` if containerd cannot be run.
pub(super) async fn containerd_version(program: &str) -> Option<String> {
    output_of(program, &["--version"], VERSION).await.ok()
}

/// What containerd answers when it is asked for its configuration.
pub(super) enum ContainerdDump {
    /// What it would use: all its files together.
    Reads(Box<Configuration>),
    /// It would not start with its files.
    Refuses(anyhow::Error),
    /// It could not be asked.
    Silent(anyhow::Error),
}

/// Ask containerd for the configuration that it uses with this file.
pub(super) async fn dump(program: &str, config: &str) -> ContainerdDump {
    let mut command = Command::new(program);
    command
        .args(["--config", config, "config", "dump"])
        .kill_on_drop(true)
        .stdin(Stdio::null());
    let output = match tokio::time::timeout(CONFIGURATION, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(error)) => {
            return ContainerdDump::Silent(anyhow::Error::new(error).context(format!("{program} could not be started")));
        }
        Err(_) => {
            return ContainerdDump::Silent(anyhow::anyhow!(
                "{program} did not answer within {} s",
                CONFIGURATION.as_secs()
            ));
        }
    };
    if !output.status.success() {
        let said = last_line(&output.stderr);
        return ContainerdDump::Refuses(anyhow::anyhow!(
            "containerd would not start with the runtime in {config}: {said}; nothing was changed"
        ));
    }
    let said = BTreeMap::from([(config.to_owned(), String::from_utf8_lossy(&output.stdout).into_owned())]);
    match containerd::read(&said, config, containerd::Merge::Keys) {
        Ok(read) => ContainerdDump::Reads(Box::new(read)),
        Err(error) => ContainerdDump::Refuses(error.into()),
    }
}

/// Return the configuration that an engine prints, as TOML.
pub(super) async fn configuration(engine: Engine, program: Option<&str>) -> anyhow::Result<String> {
    if engine != Engine::Crio {
        return output_of(program.unwrap_or("containerd"), &["config", "dump"], CONFIGURATION).await;
    }
    match output_of(program.unwrap_or("crio"), &["status", "config"], CONFIGURATION).await {
        Ok(text) => Ok(text),
        // CRI-O before 1.29 has a separate program for this.
        Err(error) => output_of("crio-status", &["config"], CONFIGURATION)
            .await
            .with_context(|| format!("{error:#}")),
    }
}

async fn output_of(program: &str, words: &[&str], longest: Duration) -> anyhow::Result<String> {
    let told = || {
        format!(
            "`{program} {}` did not print the engine's configuration; check that the program exists and that the engine runs, or use --config-source=file",
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
