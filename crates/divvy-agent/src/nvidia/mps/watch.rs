//! Tells the device plugin which resources the MPS control daemons serve.

use std::collections::{BTreeMap, BTreeSet};

use divvy_nvidia_plugin::mps::{Daemon, STARTED, directory, left_over};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Duration, timeout};
use tracing::warn;

use super::Host;
use super::tools::CONTROL;
use crate::nvidia::Mps;

/// Why a resource cannot be served, or nothing if it can.
pub(crate) type Answer = Result<(), String>;

/// Follows the control daemons of a node's resources. Dropping it ends the task.
#[derive(Debug)]
pub(crate) struct Daemons {
    wanted: watch::Sender<BTreeSet<String>>,
    found: watch::Receiver<BTreeMap<String, Answer>>,
    task: JoinHandle<()>,
}

impl Drop for Daemons {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Daemons {
    /// Start to follow the daemons. The caller must be within a tokio runtime.
    pub(crate) fn follow(mps: Mps) -> Daemons {
        let (wanted, asked) = watch::channel(BTreeSet::new());
        let (answers, found) = watch::channel(BTreeMap::new());
        let task = tokio::spawn(run(mps, asked, answers));
        Daemons { wanted, found, task }
    }

    /// Say which resources are shared through MPS.
    pub(crate) fn want(&self, resources: BTreeSet<String>) {
        self.wanted.send_if_modified(|wanted| {
            let is_other = *wanted != resources;
            *wanted = resources;
            is_other
        });
    }

    /// Report whether a resource can be served. Without an answer yet, it cannot.
    pub(crate) fn answer(&mut self, resource: &str) -> Answer {
        let found = self.found.borrow_and_update();
        let unknown = || Err("the MPS control daemon has not answered yet".to_owned());
        found.get(resource).cloned().unwrap_or_else(unknown)
    }

    /// Wait until an answer changes. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.found.changed().await.is_err() {
            // The task never ends on its own.
            std::future::pending::<()>().await;
        }
    }
}

async fn run(mps: Mps, mut wanted: watch::Receiver<BTreeSet<String>>, answers: watch::Sender<BTreeMap<String, Answer>>) {
    let host = mps.host();
    if host.tools.find(CONTROL).is_none() {
        warn!(
            "{CONTROL} is not in PATH, so a control daemon that hangs is not noticed here; with NVIDIA's container runtime, set \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        );
    }
    loop {
        let resources = wanted.borrow_and_update().clone();
        let mut found = BTreeMap::new();
        for resource in resources {
            let answer = check(&mps, &host, &resource).await;
            found.insert(resource, answer);
        }
        answers.send_if_modified(|known| {
            let is_other = *known != found;
            *known = found;
            is_other
        });
        let next = timeout(Duration::from_millis(mps.intervals.check), wanted.changed());
        if next.await.is_ok_and(|changed| changed.is_err()) {
            return;
        }
    }
}

/// Check whether the daemon of a resource serves it with its limits.
async fn check(mps: &Mps, host: &Host, resource: &str) -> Answer {
    let directory = directory(&mps.root, resource).map_err(|error| error.to_string())?;
    let daemon: Daemon = left_over(resource, directory, "");
    let marker = daemon.directory.join(STARTED);
    match marker.try_exists() {
        Ok(true) => {}
        Ok(false) => {
            return Err(format!(
                "{} does not exist; run mps-control-daemon on this node, with the same directory of the host at {}",
                marker.display(),
                mps.root.display()
            ));
        }
        Err(error) => return Err(format!("{}: {error}", marker.display())),
    }
    match host.tools.find(CONTROL) {
        Some(_) => host.answers(&daemon).await,
        None => Ok(()),
    }
}
