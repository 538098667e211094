//! Holds pods to their shares before their containers start: through the guard's files, and through the driver. The containers of pods that the driver limits get
//! limits of their own as soon as they have cgroups.

use std::collections::BTreeSet;
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use divvy_agent_core::{Action, LimitedPod, Limits, NOT_LIMITED};
use divvy_hardware::protocol::ShareName;
use divvy_hardware::{Code, Failure};
use divvy_model::{PodKey, names};
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::agent::{Agent, answered};
use crate::guard::HoldError;
use crate::limits::{self, Containers, Next};

/// The least time between two looks at the containers. It bounds what a container costs that makes cgroups without end.
const PAUSE: Duration = Duration::from_millis(100);

/// Why a container cannot start yet: its pod is not held to its share.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotLimited {
    #[error("the probe is not connected")]
    NoProbe,
    #[error("the probe did not mount a file system for the files with the pod's share of the GPU: {0}")]
    NotMounted(Failure),
    #[error("the files with the pod's share of the GPU are not complete: {0}")]
    Files(#[from] HoldError),
    #[error("the pod wants its share of the GPU to be enforced ({isolation}), and the driver does not do it: {0}", isolation = names::ISOLATION)]
    Required(String),
}

impl Agent {
    /// Let the driver hold a pod to its share, where it can. If it does not, an event says why, unless the pod requires the limit.
    ///
    /// # Errors
    /// The files of the pod's share are not ready, or the pod requires the driver's limit, and it is not set.
    pub(crate) async fn limit(self: &Arc<Self>, pod: PodKey, limits: Box<Limits>) -> Result<(), NotLimited> {
        if !limits.guarded.is_empty() {
            self.mount_shares(&limits).await?;
            let held = self.shares().hold(&limits.uid, &limits.guarded).await;
            self.metrics.guarded_pods(self.shares().pods().len());
            self.guarded.notify_one();
            self.timed.notify_one();
            // The spec mounts the files, so the container could not start without them.
            held?;
        }
        if limits.gpus.is_empty() {
            return Ok(());
        }
        let set = match self.probe() {
            Some(probe) => limits::set(probe, self.sys_root(), &limits).await,
            None => Err("the probe is not connected".to_owned()),
        };
        self.metrics.limited(set.is_ok());
        if set.is_ok() {
            let mut pods = self.with_limits.lock().unwrap_or_else(PoisonError::into_inner);
            pods.insert(limits.uid.clone());
            drop(pods);
            self.limited.notify_one();
        }
        let Err(error) = set else { return Ok(()) };
        if limits.are_required {
            return Err(NotLimited::Required(error));
        }
        if !limits.guarded.is_empty() {
            warn!(%pod, "only the guard limits the GPU memory of this pod, because the driver does not do it: {error}");
            return Ok(());
        }
        let text = format!(
            "nothing limits the GPU memory of this pod, which may use more than its share, and other pods may then find less than theirs: {error}"
        );
        warn!(%pod, "{text}");
        self.send_event(Action::Event {
            pod,
            uid: limits.uid,
            reason: NOT_LIMITED,
            text,
        });
        Ok(())
    }

    /// Have the probe give the files of a pod's shares file systems of their own, so that the pod cannot fill the node's disk through them. Where it cannot, they
    /// lie on the disk, and the node gets an event.
    ///
    /// # Errors
    /// The probe does not answer.
    async fn mount_shares(&self, limits: &Limits) -> Result<(), NotLimited> {
        for gpu in &limits.guarded {
            let share = ShareName {
                pod: limits.uid.clone(),
                gpu: gpu.uuid.clone(),
            };
            let Some(probe) = self.probe() else {
                return Err(NotLimited::NoProbe);
            };
            match answered(probe.mount_share(share)).await {
                Ok(()) => {}
                Err(failure) if matches!(failure.code, Code::ProbeUnreachable | Code::Timeout) => {
                    return Err(NotLimited::NotMounted(failure));
                }
                Err(failure) if self.shares().is_first_on_disk() => {
                    let text = format!(
                        "the files in which Divvy's guard counts what pods use lie on the disk of this node, so between two measurements a pod can fill the disk \
                         through them: {failure}"
                    );
                    warn!("{text}");
                    self.post_on_node(true, "GuardFilesOnDisk", text);
                }
                Err(failure) => debug!(
                    uid = limits.uid,
                    gpu = gpu.uuid,
                    "the files of the share lie on the disk: {failure}"
                ),
            }
        }
        Ok(())
    }

    /// Return the pods that the driver limits now. A pod's first limit is its own, so a pod is left out until it has that.
    pub(crate) fn limited_pods(&self) -> Vec<LimitedPod> {
        let core = self.core();
        let granted: BTreeSet<&str> = core.records().map(|record| record.uid.as_str()).collect();
        let mut with_limits = self.with_limits.lock().unwrap_or_else(PoisonError::into_inner);
        with_limits.retain(|uid| granted.contains(uid.as_str()));
        let mut limited = core.limited();
        limited.retain(|pod| with_limits.contains(&pod.uid));
        limited
    }

    /// Limit the containers of limited pods as soon as they have cgroups.
    pub(crate) async fn keep_limiting_containers(self: &Arc<Self>) {
        let mut containers = Containers::new(self.sys_root());
        loop {
            tokio::select! {
                () = self.limited.notified() => containers.follow(self.limited_pods()),
                () = containers.changed() => {}
            }
            let Some(probe) = self.probe() else { continue };
            loop {
                let next = containers.limit(probe, |is_set| self.metrics.limited_container(is_set)).await;
                sleep(PAUSE).await;
                if next == Next::AtChange {
                    break;
                }
            }
        }
    }
}
