//! Has an engine read its files anew.

use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use divvy_engines::{Engine, Plan, Target};
use tokio::process::Command;

/// An engine that is not up again after this has a fault that its log tells.
const LONGEST: Duration = Duration::from_secs(90);
/// How long systemd may take to say what runs.
const ASKED: Duration = Duration::from_secs(5);

/// The command that is needed.
pub(super) struct Step {
    verb: &'static str,
    unit: &'static str,
    why: &'static str,
}

impl Step {
    /// For an engine whose files have changed.
    pub(super) async fn of(engine: Engine, target: &Target, plan: &Plan, here: bool) -> Step {
        let units = engine.units();
        let mut unit = units[0];
        if here && units.len() > 1 {
            for candidate in units {
                if is_active(candidate).await {
                    unit = candidate;
                    break;
                }
            }
        }
        // dockerd reads runtimes and the default again when it is told to; whether it does CDI is settled at its start.
        let reload = matches!(target, Target::Docker { .. })
            && !plan
                .edits
                .iter()
                .any(|edit| cdi(edit.before.as_deref()) != cdi(edit.after.as_deref()));
        let (verb, why) = match (engine, reload) {
            (Engine::Docker, true) => ("reload", "containers go on running"),
            (Engine::Docker, false) => ("restart", "containers stop, unless live-restore is on"),
            _ => ("restart", "pods go on running"),
        };
        Step { verb, unit, why }
    }

    /// As it is typed.
    pub(super) fn words(&self) -> String {
        format!("systemctl {} {}", self.verb, self.unit)
    }

    /// What it does to who runs.
    pub(super) fn why(&self) -> &'static str {
        self.why
    }

    /// Does it, within a time limit.
    pub(super) async fn run(&self) -> anyhow::Result<()> {
        let mut command = Command::new("systemctl");
        command.args([self.verb, self.unit]).kill_on_drop(true).stdin(Stdio::null());
        let told = || {
            format!(
                "the files are written, but `{}` failed; see `journalctl -u {} -n 50`, or take the change back with --undo",
                self.words(),
                self.unit
            )
        };
        let output = tokio::time::timeout(LONGEST, command.output())
            .await
            .map_err(|_| anyhow::anyhow!("it took longer than {} s", LONGEST.as_secs()))
            .and_then(|output| Ok(output?))
            .with_context(told)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(anyhow::anyhow!("{said} ({})", output.status)).with_context(told);
        }
        Ok(())
    }
}

/// What a `daemon.json` says of CDI.
fn cdi(text: Option<&str>) -> Option<bool> {
    let value: serde_json::Value = serde_json::from_str(text?).ok()?;
    value.get("features")?.get("cdi")?.as_bool()
}

async fn is_active(unit: &str) -> bool {
    let mut command = Command::new("systemctl");
    command
        .args(["is-active", "--quiet", unit])
        .kill_on_drop(true)
        .stdin(Stdio::null());
    matches!(tokio::time::timeout(ASKED, command.status()).await, Ok(Ok(status)) if status.success())
}
