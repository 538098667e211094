//! A single snapshot, for programs that need no updates.

use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;
use tokio::time::timeout;

use super::child::last_line;
use super::{ProbeClient, ProbeSource, ProbeTiming, Spawn, Update, protocol};
use crate::{Failure, FailureCode, Snapshot};

/// A size limit in bytes that no valid snapshot reaches.
const LIMIT: usize = 1 << 20;

/// Return the driver's current state, from `divvy-probe --once` or from a running probe.
///
/// # Errors
/// Returns the driver's failure, or the reason why there was no answer within `limit`.
pub async fn snapshot(probe: &ProbeSource, limit: Duration) -> Result<Snapshot, Failure> {
    match probe {
        ProbeSource::Socket(_) => timeout(limit, first(probe)).await.map_err(|_| late(limit))?,
        ProbeSource::Spawn(spawn) => timeout(limit, run(spawn, &["--once"])).await.map_err(|_| late(limit))?,
    }
}

/// Return what CUDA says about NVIDIA's GPUs, from `divvy-probe --once --cuda`.
///
/// # Errors
/// Returns the driver's failure, or the reason why there was no answer within `limit`.
pub async fn cuda_snapshot(spawn: &Spawn, limit: Duration) -> Result<Snapshot, Failure> {
    timeout(limit, run(spawn, &["--once", "--cuda"]))
        .await
        .map_err(|_| late(limit))?
}

fn late(limit: Duration) -> Failure {
    let text = format!(
        "the driver has not answered for {} s; it is still being initialized, or it hangs",
        limit.as_secs()
    );
    Failure::new(FailureCode::Timeout, text)
}

async fn first(probe: &ProbeSource) -> Result<Snapshot, Failure> {
    let mut client = ProbeClient::start(probe.clone(), ProbeTiming::default());
    loop {
        match client.next().await {
            Some(Update::Snapshot(snapshot)) => return Ok(snapshot),
            Some(Update::Fault(_)) => {}
            Some(Update::Unavailable(failure)) => return Err(failure),
            None => return Err(Failure::new(FailureCode::ProbeUnreachable, "the probe's client has ended")),
        }
    }
}

async fn run(spawn: &Spawn, arguments: &[&str]) -> Result<Snapshot, Failure> {
    let unreachable = |text: String| Failure::new(FailureCode::ProbeUnreachable, text);
    let mut command: Command = spawn.command();
    command.args(arguments).stdin(Stdio::null()).kill_on_drop(true);
    let output = command
        .output()
        .await
        .map_err(|error| unreachable(format!("cannot start {}: {error}", spawn.program.display())))?;
    if !output.status.success() {
        return Err(match last_line(&output.stderr) {
            None => unreachable(format!("the probe ended without an error message ({})", output.status)),
            Some(said) => Failure::parse(&said),
        });
    }
    if output.stdout.len() > LIMIT {
        return Err(unreachable(format!(
            "{} wrote more than {LIMIT} bytes",
            spawn.program.display()
        )));
    }
    let snapshot: Snapshot = serde_json::from_slice(&output.stdout).map_err(|error| {
        Failure::new(
            FailureCode::Protocol,
            format!("{} did not print a valid snapshot: {error}", spawn.program.display()),
        )
    })?;
    snapshot.validate().map_err(protocol)?;
    Ok(snapshot)
}
