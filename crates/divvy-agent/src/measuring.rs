//! Compares what the driver reports with the guard's files of pods: memory that no allocation accounts for, and programs that avoid the guard.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divvy_agent_core::{Escape, Reaction};
use divvy_hardware::GpuProcesses;
use divvy_hardware::protocol::Kill;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::warn;

use crate::agent::Agent;
use crate::clock::next_tick;
use crate::guard::{escaped, processes_of};

/// How long to wait until the probe has killed a process.
const PATIENCE: Duration = Duration::from_secs(2);

impl Agent {
    /// Measure at each interval. While no pod is guarded, wait.
    pub(crate) async fn keep_measuring(self: &Arc<Self>, interval: Duration) {
        let mut told = BTreeMap::new();
        // In every other measurement, because the checks take as long as the reading.
        let mut checks = false;
        loop {
            if self.shares().is_empty() {
                self.guarded.notified().await;
            }
            // A measurement that took nearly as long is not followed by the next one at once.
            sleep_until(next_tick(Instant::now() + interval / 2, interval)).await;
            checks = !checks;
            // A failure is logged; the next measurement comes soon.
            let Some(processes) = self.measure(checks).await else {
                continue;
            };
            let escapes = self.escapes();
            // The events come first, because a process that was killed is not found again.
            if escapes != told && !escapes.is_empty() {
                self.reconcile(false).await;
            }
            // Also if pods are not to be stopped any more.
            let stopped = escaped(&escapes);
            self.shares().stop(&stopped).await;
            if self.core().settings().guard.as_ref().map(|guard| guard.reaction) == Some(Reaction::Kill) {
                self.kill(processes_of(&escapes, &processes)).await;
            }
            told = escapes;
        }
    }

    /// Measure once, and return the processes on the GPUs. `checks`: also look for changes of the files that their content does not show.
    async fn measure(self: &Arc<Self>, checks: bool) -> Option<Vec<GpuProcesses>> {
        let before = self.shares().read_before().await;
        let Some(processes) = self.processes().await else {
            self.account_if_due(None);
            return None;
        };
        let after = if checks {
            self.shares().check().await
        } else {
            self.shares().read().await
        };
        self.shares().measured(&processes, &before, &after).await;
        self.account_if_due(Some(&processes));
        Some(processes)
    }

    /// Return the signs that pods are not held to their shares, by pod UID. A process without the guard does not count if a container of its pod was started
    /// without the guard. A process on a GPU does not count if that GPU was granted to any container of its pod.
    pub(crate) fn escapes(&self) -> BTreeMap<String, Vec<Escape>> {
        let mut escapes = self.shares().escapes();
        let core = self.core();
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

    async fn kill(&self, escaped: Vec<Kill>) {
        let Some(probe) = self.probe() else { return };
        for kill in escaped {
            let Kill { pid, pod } = kill.clone();
            match timeout(PATIENCE, probe.kill(kill)).await {
                Ok(Ok(())) => warn!(pid, pod, "killed a process that the guard does not hold to its pod's share"),
                // The next measurement finds the process again.
                Ok(Err(failure)) => warn!(pid, pod, "{failure}"),
                Err(_) => warn!(pid, pod, "the probe did not answer in {} s", PATIENCE.as_secs()),
            }
        }
    }
}
