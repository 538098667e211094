//! A process that removes what a run leaves on the cluster when it is killed.
//!
//! It is this program with the hidden command `clean-up-after-smoke`. Its standard input is a pipe from the run: a line of JSON ([`RunToClean`]), and at the end
//! the line [`DONE`]. If the pipe is closed without this line, the run was killed.

use std::io::{self, BufRead as _};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::Context as _;
use divvy_kube::{client, objects};
use divvy_model::out_of_service::under_test_key;
use divvy_smoke_run::{Mark, RUN_LABEL};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use serde::{Deserialize, Serialize};
use tokio::io::AsyncWriteExt as _;
use tokio::process::{Child, ChildStdin};
use tokio::time::{MissedTickBehavior, interval, sleep};

use super::namespace::Namespace;

/// The last line of a run that has removed everything itself.
const DONE: &str = "done";
/// The name of the command.
pub(crate) const COMMAND: &str = "clean-up-after-smoke";
/// How often to look, and the time between two looks. A request that the run had sent may be carried out after the run was killed, so one look that finds
/// nothing is not enough.
const LOOKS: u32 = 60;
const PAUSE: Duration = Duration::from_secs(1);
const QUIET_LOOKS: u32 = 3;
/// The time between two requests: 16 in a second, as in a run.
const CALL: Duration = Duration::from_millis(63);

/// What must be known of a run to clean up after it.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RunToClean {
    /// The cluster, and the user.
    pub(super) choice: client::ClusterChoice,
    /// The namespace of the pods.
    pub(super) namespace: String,
    /// The run's id.
    pub(super) run: String,
    /// The GPUs out of service that the run tests again.
    pub(super) tests: Vec<RetestedGpu>,
}

/// A GPU that a run tests again.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct RetestedGpu {
    pub(super) node: String,
    pub(super) uuid: String,
    /// Why it is out of service.
    pub(super) failed_before: String,
}

/// The process, as the run knows it.
#[derive(Debug)]
pub(super) struct Cleaner {
    child: Child,
    pipe: ChildStdin,
}

impl Cleaner {
    /// Start the process.
    ///
    /// # Errors
    /// This program cannot be started again.
    pub(super) async fn start(run: &RunToClean) -> anyhow::Result<Cleaner> {
        let program = std::env::current_exe().context("the path of this program is unknown")?;
        let mut command = Command::new(program);
        // Ctrl-C on a terminal, and a signal to the group of the run, must not reach it.
        command.arg(COMMAND).process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = tokio::process::Command::from(command).spawn()?;
        let mut pipe = child.stdin.take().context("it has no standard input")?;
        let mut line = serde_json::to_string(run)?;
        line.push('\n');
        pipe.write_all(line.as_bytes()).await?;
        Ok(Cleaner { child, pipe })
    }

    /// Tell the process that nothing is left to do. If it is gone already, nothing is to be told.
    pub(super) async fn dismiss(mut self) {
        let told = self.pipe.write_all(format!("{DONE}\n").as_bytes()).await;
        drop(self.pipe);
        if told.is_ok() {
            let _ = self.child.wait().await;
        }
    }
}

/// Wait until the run on the other end of standard input has ended. If it was killed, remove what it left.
pub(crate) async fn run() -> anyhow::Result<()> {
    let mut lines = io::stdin().lock().lines();
    let first = lines.next().context("no run was named on standard input")??;
    let run: RunToClean = serde_json::from_str(&first).context("the run on standard input is not understood")?;
    // A pipe that cannot be read is closed, too.
    if lines.any(|line| line.is_ok_and(|line| line == DONE)) {
        return Ok(());
    }
    let client = client::connect(&run.choice).await?.client;
    let pods: Api<Pod> = Api::namespaced(client.clone(), &run.namespace);
    let of_run = ListParams::default().labels(&format!("{RUN_LABEL}={}", run.run)).limit(500);
    let mut calls = interval(CALL);
    calls.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut quiet = 0;
    for _ in 0..LOOKS {
        calls.tick().await;
        let mut is_quiet = false;
        match pods.list_metadata(&of_run).await {
            Ok(list) => {
                is_quiet = list.items.is_empty();
                let live = list.items.into_iter().filter(|pod| pod.metadata.deletion_timestamp.is_none());
                for name in live.filter_map(|pod| pod.metadata.name) {
                    calls.tick().await;
                    // One that is not deleted is found again at the next look.
                    let _ = pods.delete(&name, &DeleteParams::default()).await;
                }
            }
            Err(kube::Error::Api(status)) if matches!(status.code, 401 | 403) => break,
            Err(_) => {}
        }
        for test in &run.tests {
            calls.tick().await;
            is_quiet &= close(&client, test, &run.run).await.unwrap_or(false);
        }
        quiet = if is_quiet { quiet + 1 } else { 0 };
        if quiet == QUIET_LOOKS {
            break;
        }
        sleep(PAUSE).await;
    }
    Namespace::find(&client, &run.namespace).await.leave(&run.run).await;
    Ok(())
}

/// End the test of a GPU, which stays out of service. Return false if this run was testing it until now.
async fn close(client: &kube::Client, test: &RetestedGpu, run: &str) -> Result<bool, kube::Error> {
    let nodes: Api<DynamicObject> = Api::all_with(client.clone(), &objects::nodes());
    let annotations = nodes.get_metadata(&test.node).await?.metadata.annotations;
    let tester = annotations.and_then(|mut all| all.remove(&under_test_key(&test.uuid)));
    if tester.as_deref() != Some(run) {
        return Ok(true);
    }
    let patch = Mark::Failed(test.failed_before.clone()).patch(&test.uuid, run);
    nodes
        .patch_metadata(&test.node, &PatchParams::default(), &Patch::Merge(&patch))
        .await?;
    Ok(false)
}
