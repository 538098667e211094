//! Tells the device plugin which resources the MPS control daemons serve, and lets containers wait for them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

use divvy_nvidia_plugin::mps::{Daemon, STARTED, Service, directory, left_over};
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{Duration, Instant, sleep, timeout};
use tracing::warn;

use super::MpsHost;
use super::tools::{CONTROL, ToolError};
use crate::nvidia::MpsSurroundings;

/// The time between two checks while a container waits.
const RECHECK: Duration = Duration::from_millis(200);

/// Why a daemon does not serve its resource.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotServed {
    #[error("the MPS control daemon does not answer")]
    Late,
    #[error(transparent)]
    Name(#[from] divvy_nvidia_plugin::Error),
    #[error(
        "{marker} does not exist; run mps-control-daemon on this node, with the same directory of the host at {root}",
        marker = .marker.display(),
        root = .root.display()
    )]
    NoMarker { marker: PathBuf, root: PathBuf },
    #[error("{path}: {1}", path = .0.display())]
    Marker(PathBuf, #[source] io::Error),
    #[error(transparent)]
    Silent(#[from] ToolError),
}

/// Follows the control daemons of a node's resources. Dropping it ends the task.
#[derive(Debug)]
pub(crate) struct Daemons {
    wanted: watch::Sender<BTreeSet<String>>,
    found: watch::Receiver<BTreeMap<String, Service>>,
    task: JoinHandle<()>,
}

impl Drop for Daemons {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Daemons {
    /// Start to follow the daemons. The caller must be within a tokio runtime.
    pub(crate) fn follow(mps: MpsSurroundings) -> Daemons {
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

    /// Return what is known about the daemon of a resource.
    pub(crate) fn service(&mut self, resource: &str) -> Service {
        let found = self.found.borrow_and_update();
        let unknown = || Service::Absent("the MPS control daemon has not answered yet".to_owned());
        found.get(resource).cloned().unwrap_or_else(unknown)
    }

    /// Wait until something else is known. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        if self.found.changed().await.is_err() {
            // The task never ends on its own.
            std::future::pending::<()>().await;
        }
    }
}

async fn run(
    mps: MpsSurroundings,
    mut wanted: watch::Receiver<BTreeSet<String>>,
    answers: watch::Sender<BTreeMap<String, Service>>,
) {
    let (host, started) = (mps.host(), Instant::now());
    let mut known = BTreeMap::new();
    // When the daemon of each resource has last answered.
    let mut answered: BTreeMap<String, u64> = BTreeMap::new();
    if !host.tools.has(CONTROL) {
        warn!(
            "{CONTROL} is not in PATH, so a control daemon that hangs is not noticed here; with NVIDIA's container runtime, set \
             NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        );
    }
    loop {
        let resources = wanted.borrow_and_update().clone();
        let mut found = BTreeMap::new();
        for resource in resources {
            let now = u64::try_from(started.elapsed().as_millis()).unwrap_or(u64::MAX);
            let is_due = |last: &u64| now.saturating_sub(*last) >= mps.intervals.ask;
            let asks = known.get(&resource) != Some(&Service::Serves) || answered.get(&resource).is_none_or(is_due);
            let checked = check(&mps, &host, &resource, asks).await;
            if asks && checked.is_ok() {
                answered.insert(resource.clone(), now);
            }
            let service = Service::after(
                known.get(&resource),
                checked.err().map(|error| error.to_string()),
                now,
                mps.intervals,
            );
            found.insert(resource, service);
        }
        answers.send_if_modified(|sent| {
            let is_other = *sent != found;
            sent.clone_from(&found);
            is_other
        });
        known = found;
        let next = timeout(Duration::from_millis(mps.intervals.check), wanted.changed());
        if next.await.is_ok_and(|changed| changed.is_err()) {
            return;
        }
    }
}

/// Wait until the daemon of a resource serves it. Cancel-safe.
///
/// # Errors
/// It does not within [`MpsSurroundings::patience`]. The text says what is missing.
pub(crate) async fn served(mps: &MpsSurroundings, resource: &str) -> Result<(), NotServed> {
    let host = mps.host();
    let mut missing = NotServed::Late;
    let serves = async {
        while let Err(reason) = check(mps, &host, resource, true).await {
            missing = reason;
            sleep(RECHECK).await;
        }
    };
    let in_time = timeout(mps.patience, serves).await.is_ok();
    in_time.then_some(()).ok_or(missing)
}

/// Check whether the daemon of a resource serves it with its limits. `asks`: also whether it answers.
async fn check(mps: &MpsSurroundings, host: &MpsHost, resource: &str, asks: bool) -> Result<(), NotServed> {
    let directory = directory(&mps.root, resource)?;
    let daemon: Daemon = left_over(resource, directory, "");
    let marker = daemon.directory.join(STARTED);
    match marker.try_exists() {
        Ok(true) => {}
        Ok(false) => {
            let root = mps.root.clone();
            return Err(NotServed::NoMarker { marker, root });
        }
        Err(error) => return Err(NotServed::Marker(marker, error)),
    }
    if asks && host.tools.has(CONTROL) {
        host.answers(&daemon).await?;
    }
    Ok(())
}
