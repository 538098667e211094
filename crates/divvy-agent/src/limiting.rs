//! Holds pods to their shares before their containers start: through the guard's files, and through the driver. The containers of pods that the driver limits get
//! limits of their own as soon as they have cgroups.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use divvy_agent_core::{AgentAction, Escape, LimitError, LimitStep, NotLimited, WithoutLimit};
use divvy_hardware::FailureCode;
use divvy_hardware::protocol::ShareName;
use tokio::sync::Notify;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::guard::Shares;
use crate::limits::{self, Containers, NextLook};
use crate::probe_access::{ProbeAccess, answered};
use crate::reports::Reports;
use crate::shared_core::SharedCore;

/// The least time between two looks at the containers. It bounds what a container costs that makes cgroups without end.
const PAUSE: Duration = Duration::from_millis(100);

/// The files of pods' shares, and the pods that the driver limits.
pub(crate) struct Limiting {
    core: Arc<SharedCore>,
    probe: Arc<ProbeAccess>,
    reports: Arc<Reports>,
    sys_root: PathBuf,
    /// The guard's files of pods. There are some after `--guard` was switched off, too: until these pods end.
    pub(crate) shares: Shares,
    /// Notified when a pod got such files.
    pub(crate) guarded: Notify,
    /// Notified when a container got a grant: how long it keeps the GPU busy is measured.
    pub(crate) timed: Notify,
    /// Notified when pods may have got or lost limits of the driver.
    limited: Notify,
}

impl Limiting {
    pub(crate) fn new(
        core: Arc<SharedCore>,
        probe: Arc<ProbeAccess>,
        reports: Arc<Reports>,
        sys_root: PathBuf,
        shares: Shares,
    ) -> Limiting {
        Limiting {
            core,
            probe,
            reports,
            sys_root,
            shares,
            guarded: Notify::new(),
            timed: Notify::new(),
            limited: Notify::new(),
        }
    }

    /// Take the steps that hold a pod to its share.
    ///
    /// # Errors
    /// A step failed, and without it the container must not start.
    pub(crate) async fn limit(&self, steps: Vec<LimitStep>) -> Result<(), NotLimited> {
        for step in steps {
            let Err(error) = self.take(&step).await else {
                let is_of_driver = matches!(step, LimitStep::Driver { .. });
                self.core.lock().commit(&AgentAction::Limit(step));
                if is_of_driver {
                    self.limited.notify_one();
                }
                continue;
            };
            debug!(?step, %error, "a step that holds a pod to its share failed");
            let follows = self.core.lock().not_limited(&step, error);
            match follows {
                WithoutLimit::Refuse(why) => return Err(why),
                WithoutLimit::Warn(pod, text) => warn!(%pod, "{text}"),
                WithoutLimit::TellPod(event) => self.reports.post_event(event),
                WithoutLimit::TellNode { reason, text } => {
                    warn!("{text}");
                    self.reports.post_on_node(true, reason, text);
                }
                WithoutLimit::GoOn => {}
            }
        }
        Ok(())
    }

    async fn take(&self, step: &LimitStep) -> Result<(), LimitError> {
        let not_done = |error: &dyn Display| LimitError::NotDone(error.to_string());
        match step {
            LimitStep::Mount(share) => {
                let name = ShareName {
                    pod: share.pod().to_owned(),
                    gpu: share.gpu().to_owned(),
                };
                let probe = self.probe.get().ok_or(LimitError::NoProbe)?;
                let mounted = answered(probe.mount_share(name)).await;
                mounted.map_err(|failure| match failure.code {
                    FailureCode::ProbeUnreachable | FailureCode::Timeout => LimitError::NoAnswer(failure.to_string()),
                    _ => not_done(&failure),
                })
            }
            LimitStep::Files { uid, shares } => {
                let held = self.shares.hold(uid, shares).await;
                self.reports.metrics.guarded_pods(self.shares.pods().len());
                self.guarded.notify_one();
                self.timed.notify_one();
                held.map_err(|error| not_done(&error))
            }
            LimitStep::Driver { uid, gpus, .. } => {
                let set = match self.probe.get() {
                    Some(probe) => {
                        let set = limits::set(probe, &self.sys_root, uid, gpus).await;
                        set.map_err(|error| not_done(&error))
                    }
                    None => Err(LimitError::NoProbe),
                };
                self.reports.metrics.limited(set.is_ok());
                set
            }
        }
    }

    /// Remove the files of pods that are gone.
    pub(crate) async fn clear(&self, gone: &BTreeSet<String>) {
        self.shares.clear(gone, self.probe.get()).await;
        self.reports.metrics.guarded_pods(self.shares.pods().len());
    }

    /// Look at the containers of all limited pods again.
    pub(crate) fn look_at_containers(&self) {
        self.limited.notify_one();
    }

    /// Return the signs that pods are not held to their shares, by pod UID. A process without the guard does not count if a container of its pod was started
    /// without the guard. A process on a GPU does not count if that GPU was granted to any container of its pod.
    pub(crate) fn escapes(&self) -> BTreeMap<String, Vec<Escape>> {
        let mut escapes = self.shares.escapes();
        let core = self.core.lock();
        for (uid, all) in &mut escapes {
            let is_guarded = core.is_guarded(uid);
            all.retain(|escape| match escape {
                Escape::Unguarded { .. } => is_guarded,
                Escape::NotGranted { uuid, .. } => !core.is_granted(uid, uuid),
                _ => true,
            });
        }
        escapes.retain(|_, all| !all.is_empty());
        escapes
    }

    /// Limit the containers of limited pods as soon as they have cgroups.
    pub(crate) async fn keep_limiting_containers(&self) {
        let mut containers = Containers::new(&self.sys_root);
        loop {
            tokio::select! {
                () = self.limited.notified() => {
                    let limited = self.core.lock().limited();
                    containers.follow(limited);
                }
                () = containers.changed() => {}
            }
            let Some(probe) = self.probe.get() else { continue };
            loop {
                let next = containers
                    .limit(probe, |is_set| self.reports.metrics.limited_container(is_set))
                    .await;
                sleep(PAUSE).await;
                if next == NextLook::AtChange {
                    break;
                }
            }
        }
    }
}
