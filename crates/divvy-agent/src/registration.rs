//! Whether the kubelet knows the agent's devices. Before it learns of them, and after it has lost them, the kubelet permanently
//! rejects every pod that is bound here ("no healthy devices present"). During that time, the inventory says that no pod may be
//! bound.
//!
//! A successful registration and an open ListAndWatch stream do not mean that the kubelet has processed the devices. Once it has, it writes
//! its checkpoint with the ids that are healthy (`genericDeviceUpdateCallback` in `pkg/kubelet/cm/devicemanager/manager.go`).

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use divvy_kubelet::checkpoint::{Checkpoint, Writing};
use divvy_kubelet::plugin::{PluginDevice, PluginStatus};
use tokio::sync::watch;
use tokio::time::{Instant, sleep};
use tracing::{debug, warn};

use crate::publishing::Publishing;

/// The first pause between two checks of the checkpoint. Each pause is twice as long as the one before.
const LOOK_FIRST: Duration = Duration::from_millis(2);
const LOOK_MAX: Duration = Duration::from_millis(100);
/// The time after which the agent stops waiting for the checkpoint. A kubelet that takes longer has trouble with its disk, or no longer
/// writes its checkpoint at this point.
const PATIENCE: Duration = Duration::from_secs(2);

/// A registered resource.
pub(crate) struct Registration {
    /// The devices that the kubelet receives.
    pub(crate) devices: watch::Receiver<Arc<Vec<PluginDevice>>>,
    /// The extended resource.
    pub(crate) name: String,
    pub(crate) status: watch::Receiver<PluginStatus>,
}

/// The checkpoint as it was before the kubelet got the newest list of devices from a new plugin, or after a plugin's registration ended.
pub(crate) type Before = Arc<Mutex<Option<Writing>>>;

/// Tell the core whether the kubelet knows the devices, until the servers have ended.
pub(crate) async fn follow(
    publishing: Arc<Publishing>,
    directory: PathBuf,
    before: Before,
    mut registrations: Vec<Registration>,
) {
    let mut statuses: Vec<_> = registrations.iter().map(|one| one.status.clone()).collect();
    while let Some(counts) = all_ready(&mut registrations).await {
        debug!("the kubelet watches the devices; waiting until its checkpoint has them");
        let newest = *lock(&before);
        let ended = tokio::select! {
            () = written(&directory, newest, &registrations) => {
                publishing.set_registered(true);
                any_ended(&mut statuses, &counts).await
            }
            ended = any_ended(&mut statuses, &counts) => ended,
        };
        *lock(&before) = Writing::of(&directory);
        publishing.set_registered(false);
        if ended.is_none() {
            return;
        }
    }
}

pub(crate) fn lock(before: &Before) -> MutexGuard<'_, Option<Writing>> {
    before.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Wait until the kubelet watches the devices of all resources, and return each resource's number of registrations. Return `None`
/// if the servers have ended.
async fn all_ready(registrations: &mut [Registration]) -> Option<Vec<u64>> {
    loop {
        let mut counts = Vec::new();
        for registration in registrations.iter_mut() {
            let status = registration.status.wait_for(PluginStatus::is_ready).await.ok()?;
            counts.push(status.registrations);
        }
        // The first registration may have ended while the others were pending.
        if registrations.iter().all(|one| one.status.borrow().is_ready()) {
            return Some(counts);
        }
    }
}

/// Wait until one of these registrations has ended. Return `None` if the servers have ended.
async fn any_ended(statuses: &mut [watch::Receiver<PluginStatus>], counts: &[u64]) -> Option<()> {
    let ends = statuses.iter_mut().zip(counts).map(|(status, count)| {
        let ended = status.wait_for(move |status| !status.is_ready() || status.registrations != *count);
        Box::pin(async { ended.await.ok().map(drop) })
    });
    let (ended, _, _) = futures::future::select_all(ends).await;
    ended
}

/// Wait until the kubelet has written a checkpoint other than `before` that contains all healthy ids.
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
        "the kubelet watches the devices, but has not written them to its checkpoint within {PATIENCE:?}; assuming that it knows them"
    );
}

async fn has_all(directory: &Path, registrations: &[Registration]) -> bool {
    let directory = directory.to_owned();
    let read = tokio::task::spawn_blocking(move || Checkpoint::read(&directory)).await;
    // `NodeFacts::read` reports a checkpoint that cannot be read.
    let Ok(Ok(Some(checkpoint))) = read else { return false };
    registrations.iter().all(|registration| {
        let there = checkpoint.registered.get(&registration.name);
        let there: BTreeSet<&str> = there.into_iter().flatten().map(String::as_str).collect();
        let sent = registration.devices.borrow();
        sent.iter()
            .all(|device| !device.healthy || there.contains(device.id.as_str()))
    })
}
