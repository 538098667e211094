//! Which probe a command asks.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context as _;
use divvy_agent as agent;
use divvy_hardware::client::{ProbeSource, Spawn};

/// The time limit for the probe. It is long because the initialization of a driver also initializes each of its GPUs.
pub(super) const PATIENCE: Duration = Duration::from_secs(75);

/// Return the probe that `--probe` names, else the `divvy-probe` in this program's directory. `spawn` says how to start a program.
pub(super) fn named(probe: Option<&str>, spawn: impl FnOnce(PathBuf) -> Spawn) -> anyhow::Result<ProbeSource> {
    let program = match probe {
        Some(text) => match text.parse().map_err(anyhow::Error::msg).context("--probe")? {
            agent::ProbeChoice::Socket(socket) => return Ok(ProbeSource::Socket(socket)),
            agent::ProbeChoice::Start(program) => program,
        },
        None => {
            let own = std::env::current_exe().context(
                "this program's own path is unknown, so divvy-probe cannot be found next to it; give its path with --probe",
            )?;
            own.with_file_name("divvy-probe")
        }
    };
    Ok(ProbeSource::Spawn(spawn(program)))
}
