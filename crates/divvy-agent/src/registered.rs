//! Whether the kubelet has our devices. Before that, and when it has lost them, it refuses for good every pod that is bound here ("no healthy
//! devices present"), so the inventory says that nothing is to be bound.
//!
//! That the kubelet took a registration and listens does not mean yet that it has read what it was sent. When it has, it writes its checkpoint, with
//! the ids that are healthy (`genericDeviceUpdateCallback` in the kubelet's `devicemanager/manager.go`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use divvy_kubelet::checkpoint::{Checkpoint, Writing};
use divvy_kubelet::plugin::{Device, Status};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use crate::agent::Agent;

/// Between two looks at the checkpoint, at first; doubled each time.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_MAX: Duration = Duration::from_millis(100);
/// A kubelet that has not written its checkpoint by then has trouble with its disk, or another way of doing things.
const PATIENCE: Duration = Duration::from_secs(2);

/// One resource that is registered.
pub(crate) struct Registration {
    /// What the kubelet is sent.
    pub(crate) devices: watch::Receiver<Arc<Vec<Device>>>,
    /// The resource.
    pub(crate) name: String,
    pub(crate) status: watch::Receiver<Status>,
}

/// Tells the core, until the servers have ended. `before`: the checkpoint as it was before anything was sent.
pub(crate) async fn follow(
    agent: Arc<Agent>,
    directory: PathBuf,
    mut before: Option<Writing>,
    mut registrations: Vec<Registration>,
) {
    let mut statuses: Vec<_> = registrations.iter().map(|one| one.status.clone()).collect();
    while let Some(counts) = all_ready(&mut registrations).await {
        debug!("the kubelet listens; waiting until it has written down what it heard");
        let ended = tokio::select! {
            () = written(&directory, before, &registrations) => {
                tell(&agent, true);
                any_ended(&mut statuses, &counts).await
            }
            ended = any_ended(&mut statuses, &counts) => ended,
        };
        before = Writing::of(&directory);
        tell(&agent, false);
        if ended.is_none() {
            return;
        }
    }
}

fn tell(agent: &Agent, registered: bool) {
    agent.core().set_registered(registered);
    agent.publish();
}

/// Waits until the kubelet listens to all of them; gives the numbers of their registrations. `None`: the servers have ended.
async fn all_ready(registrations: &mut [Registration]) -> Option<Vec<u64>> {
    loop {
        let mut counts = Vec::new();
        for registration in registrations.iter_mut() {
            let status = registration.status.wait_for(Status::is_ready).await.ok()?;
            counts.push(status.registrations);
        }
        // The first may have gone while the others were waited for.
        if registrations.iter().all(|one| one.status.borrow().is_ready()) {
            return Some(counts);
        }
    }
}

/// Waits until one of these registrations has ended. `None`: the servers have.
async fn any_ended(statuses: &mut [watch::Receiver<Status>], counts: &[u64]) -> Option<()> {
    let ends = statuses.iter_mut().zip(counts).map(|(status, count)| {
        let ended = status.wait_for(move |status| !status.is_ready() || status.registrations != *count);
        Box::pin(async { ended.await.ok().map(drop) })
    });
    let (ended, _, _) = futures::future::select_all(ends).await;
    ended
}

/// Waits until the kubelet has written a checkpoint other than the one before, with all ids that are healthy.
async fn written(directory: &Path, before: Option<Writing>, registrations: &[Registration]) {
    let began = Instant::now();
    let mut pause = LOOK_FIRST;
    while began.elapsed() < PATIENCE {
        if Writing::of(directory) != before && has_all(directory, registrations).await {
            return;
        }
        sleep(pause).await;
        pause = (pause * 2).min(LOOK_MAX);
    }
    warn!(
        "the kubelet listens to our devices and has not written them to its checkpoint within {PATIENCE:?}; taking it that it has them"
    );
}

async fn has_all(directory: &Path, registrations: &[Registration]) -> bool {
    let directory = directory.to_owned();
    let read = tokio::task::spawn_blocking(move || Checkpoint::read(&directory)).await;
    // One that cannot be read is told of by whoever needs its entries.
    let Ok(Ok(Some(checkpoint))) = read else { return false };
    registrations.iter().all(|registration| {
        let there = checkpoint.registered.get(&registration.name);
        let there: BTreeSet<&str> = there.into_iter().flatten().map(String::as_str).collect();
        let sent = registration.devices.borrow();
        sent.iter()
            .all(|device| !device.healthy || there.contains(device.id.as_str()))
    })
}
