//! Makes an engine reload its files.

use std::process::Stdio;
use std::time::Duration;

use anyhow::Context as _;
use divvy_engines::{EditPlan, Engine, EngineTarget};
use tokio::process::Command;

/// The time limit for a reload or restart. An engine that takes longer has a fault, which its log shows.
const LONGEST: Duration = Duration::from_secs(90);
/// The time limit for `systemctl is-active`.
const ASKED: Duration = Duration::from_secs(5);

/// The systemctl command that makes an engine reload its files.
pub(super) struct RestartStep {
    verb: &'static str,
    unit: &'static str,
    why: &'static str,
}

impl RestartStep {
    /// Choose the command for an engine whose files have changed.
    pub(super) async fn of(engine: Engine, target: &EngineTarget, plan: &EditPlan, here: bool) -> RestartStep {
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
        // On a reload, dockerd reads the runtimes and the default runtime again. It reads the CDI setting only when it starts.
        let reload = matches!(target, EngineTarget::Docker { .. })
            && !plan
                .edits
                .iter()
                .any(|edit| cdi(edit.before.as_deref()) != cdi(edit.after.as_deref()));
        let (verb, why) = match (engine, reload) {
            (Engine::Docker, true) => ("reload", "containers keep running"),
            (Engine::Docker, false) => ("restart", "containers stop, unless live-restore is on"),
            _ => ("restart", "pods keep running"),
        };
        RestartStep { verb, unit, why }
    }

    /// Return the command line.
    pub(super) fn words(&self) -> String {
        format!("systemctl {} {}", self.verb, self.unit)
    }

    /// Return a text about the effect of the command on running containers.
    pub(super) fn why(&self) -> &'static str {
        self.why
    }

    /// Run the command, within a time limit.
    pub(super) async fn run(&self) -> anyhow::Result<()> {
        let mut command = Command::new("systemctl");
        command.args([self.verb, self.unit]).kill_on_drop(true).stdin(Stdio::null());
        let told = || {
            format!(
                "the files are written, but `{}` failed; see `journalctl -u {} -n 50`, or undo the change with --undo",
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

/// Return the value of `features.cdi` in a `daemon.json`. `None` if it is not set.
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
