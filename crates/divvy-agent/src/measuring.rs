//! Compares what the driver reports with the guard's files of pods: memory that no allocation accounts for, and programs that avoid the guard.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use divvy_agent_core::{Escape, Reaction};
use divvy_hardware::GpuProcesses;
use divvy_hardware::protocol::Kill;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{instrument, warn};

use crate::accounting::Accounting;
use crate::clock::next_tick;
use crate::grants::Grants;
use crate::guard::{escaped, processes_of};
use crate::limiting::Limiting;
use crate::probe_access::ProbeAccess;
use crate::shared_core::SharedCore;

/// How long to wait until the probe has killed a process.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a measurement needs and changes.
pub(crate) struct Measuring {
    pub(crate) core: Arc<SharedCore>,
    pub(crate) probe: Arc<ProbeAccess>,
    pub(crate) limiting: Arc<Limiting>,
    pub(crate) accounting: Arc<Accounting>,
    pub(crate) grants: Arc<Grants>,
}

impl Measuring {
    /// Measure at each interval. While no pod is guarded, wait.
    pub(crate) async fn run(self, interval: Duration) {
        let mut told = BTreeMap::new();
        // In every other measurement, because the checks take as long as the reading.
        let mut checks = false;
        loop {
            if self.limiting.shares.is_empty() {
                self.limiting.guarded.notified().await;
            }
            // A measurement that took nearly as long is not followed by the next one at once.
            sleep_until(next_tick(Instant::now() + interval / 2, interval)).await;
            checks = !checks;
            self.look(checks, &mut told).await;
        }
    }

    /// Measure once, and act on the signs that are not those of the measurement before.
    #[instrument(name = "measure", skip_all)]
    async fn look(&self, checks: bool, told: &mut BTreeMap<String, Vec<Escape>>) {
        // A failure is logged; the next measurement comes soon.
        let Some(processes) = self.measure(checks).await else {
            return;
        };
        let escapes = self.limiting.escapes();
        // The events come first, because a process that was killed is not found again.
        if escapes != *told && !escapes.is_empty() {
            self.grants.reconcile(false).await;
        }
        // Also if pods are not to be stopped any more.
        let stopped = escaped(&escapes);
        self.limiting.shares.stop(&stopped).await;
        if self.core.lock().settings().guard.as_ref().map(|guard| guard.reaction) == Some(Reaction::Kill) {
            self.kill(processes_of(&escapes, &processes)).await;
        }
        *told = escapes;
    }

    /// Measure once, and return the processes on the GPUs. `checks`: also look for changes of the files that their content does not show.
    async fn measure(&self, checks: bool) -> Option<Vec<GpuProcesses>> {
        let before = self.limiting.shares.read_before().await;
        let Some(processes) = self.probe.processes().await else {
            self.accounting.account_if_due(None);
            return None;
        };
        let after = if checks {
            self.limiting.shares.check().await
        } else {
            self.limiting.shares.read().await
        };
        self.limiting.shares.measured(&processes, &before, &after).await;
        self.accounting.account_if_due(Some(&processes));
        Some(processes)
    }

    async fn kill(&self, escaped: Vec<Kill>) {
        let Some(probe) = self.probe.get() else { return };
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
