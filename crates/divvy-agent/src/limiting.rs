//! Holds pods to their shares before their containers start: through the guard's files, and through the driver. The containers of pods that the driver limits get
//! limits of their own as soon as they have cgroups.

use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

use divvy_agent_core::{Action, Limit, LimitError, NotLimited, WithoutLimit};
use divvy_hardware::Code;
use divvy_hardware::protocol::ShareName;
use tokio::time::sleep;
use tracing::{debug, warn};

use crate::agent::{Agent, answered};
use crate::limits::{self, Containers, Next};

/// The least time between two looks at the containers. It bounds what a container costs that makes cgroups without end.
const PAUSE: Duration = Duration::from_millis(100);

impl Agent {
    /// Take the steps that hold a pod to its share.
    ///
    /// # Errors
    /// A step failed, and without it the container must not start.
    pub(crate) async fn limit(self: &Arc<Self>, steps: Vec<Limit>) -> Result<(), NotLimited> {
        for step in steps {
            let Err(error) = self.take(&step).await else {
                let is_of_driver = matches!(step, Limit::Driver { .. });
                self.core().commit(&Action::Limit(step));
                if is_of_driver {
                    self.limited.notify_one();
                }
                continue;
            };
            debug!(?step, %error, "a step that holds a pod to its share failed");
            let follows = self.core().not_limited(&step, error);
            match follows {
                WithoutLimit::Refuse(why) => return Err(why),
                WithoutLimit::Warn(pod, text) => warn!(%pod, "{text}"),
                WithoutLimit::TellPod(event) => self.send_event(event),
                WithoutLimit::TellNode { reason, text } => {
                    warn!("{text}");
                    self.post_on_node(true, reason, text);
                }
                WithoutLimit::GoOn => {}
            }
        }
        Ok(())
    }

    async fn take(&self, step: &Limit) -> Result<(), LimitError> {
        let not_done = |error: &dyn Display| LimitError::NotDone(error.to_string());
        match step {
            Limit::Mount(share) => {
                let name = ShareName {
                    pod: share.pod().to_owned(),
                    gpu: share.gpu().to_owned(),
                };
                let probe = self.probe().ok_or(LimitError::NoProbe)?;
                let mounted = answered(probe.mount_share(name)).await;
                mounted.map_err(|failure| match failure.code {
                    Code::ProbeUnreachable | Code::Timeout => LimitError::NoAnswer(failure.to_string()),
                    _ => not_done(&failure),
                })
            }
            Limit::Files { uid, shares } => {
                let held = self.shares().hold(uid, shares).await;
                self.metrics.guarded_pods(self.shares().pods().len());
                self.guarded.notify_one();
                self.timed.notify_one();
                held.map_err(|error| not_done(&error))
            }
            Limit::Driver { uid, gpus, .. } => {
                let set = match self.probe() {
                    Some(probe) => {
                        let set = limits::set(probe, self.sys_root(), uid, gpus).await;
                        set.map_err(|error| not_done(&error))
                    }
                    None => Err(LimitError::NoProbe),
                };
                self.metrics.limited(set.is_ok());
                set
            }
        }
    }

    /// Limit the containers of limited pods as soon as they have cgroups.
    pub(crate) async fn keep_limiting_containers(self: &Arc<Self>) {
        let mut containers = Containers::new(self.sys_root());
        loop {
            tokio::select! {
                () = self.limited.notified() => containers.follow(self.core().limited()),
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
