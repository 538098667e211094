//! Plays a scenario to an MPS control daemon.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use rustix::process::Signal;
use serde_json::json;
use tokio::time::{sleep, timeout};

use crate::mps::state;
use crate::play::{PlayOutcome, PlayedProgram, SETTLE, START, beside};
use crate::scenario::PluginScenario;

/// How long to wait for a daemon that should not become ready.
const NEVER: Duration = Duration::from_secs(4);
/// How long the program may take to end after a signal.
const END: Duration = Duration::from_secs(15);
const LOOK: Duration = Duration::from_millis(50);

/// Play a scenario: let the program become ready, and end it. The answers are the calls of the driver's programs and the files that
/// exist, first when it is ready, and then when it has ended.
pub(crate) async fn play(program: &Path, simulator: &Path, scenario: &PluginScenario) -> Result<PlayOutcome> {
    let mut running = PlayedProgram::start(&beside(program, scenario), simulator, scenario)?;
    let patience = if scenario.resources > 0 { START } else { NEVER };
    let marker = running.directory.path().join("mps/.ready");
    let ready = async {
        while !marker.exists() {
            sleep(LOOK).await;
        }
        sleep(SETTLE).await;
    };
    let exit = tokio::select! {
        status = running.child.wait() => Some(status?.code().unwrap_or(-1)),
        ready = timeout(patience, ready) => {
            ensure!(ready.is_ok() || scenario.resources == 0, "it is not ready after {START:?}\n{}", running.last_line()?);
            None
        }
    };
    let mut answers = vec![state(running.directory.path())?];
    let error = exit.map(|_| running.last_line()).transpose()?;
    if exit.is_none() {
        running.signal(Signal::TERM)?;
        let status = timeout(END, running.child.wait())
            .await
            .context("the program does not end")??;
        answers.push(json!({"exit": status.code()}));
        answers.push(state(running.directory.path())?);
    }
    running.stop().await?;
    Ok(PlayOutcome {
        name: scenario.name.to_owned(),
        exit,
        error,
        registrations: Vec::new(),
        devices: BTreeMap::new(),
        answers,
    })
}
