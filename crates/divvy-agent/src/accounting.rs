//! Measures what the node's GPUs and the containers on them use.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use divvy_hardware::GpuProcesses;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use crate::agent::Agent;
use crate::clock::next_tick;

/// The time between two measurements while the metrics are not read.
const PERIOD: Duration = Duration::from_secs(5);
/// A reader who comes within this time gets the values of the measurement before.
const FRESH: Duration = Duration::from_secs(1);
/// How long to wait for the driver.
const PATIENCE: Duration = Duration::from_secs(2);

impl Agent {
    /// Measure what containers use, while there are any, so that short use is seen between two readers of the metrics.
    pub(crate) async fn keep_accounts(self: &Arc<Self>) {
        loop {
            sleep_until(next_tick(Instant::now(), PERIOD)).await;
            if self.shares().is_empty() {
                self.account().await;
            } else {
                self.usage().is_due.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Measure for a reader of the metrics, unless that was done just now.
    pub(crate) async fn measure_for_metrics(&self) {
        let mut asked = self.usage().asked.lock().await;
        if asked.is_some_and(|asked| asked.elapsed() < FRESH) {
            return;
        }
        *asked = Some(Instant::now());
        self.account().await;
        let Some(probe) = self.probe() else { return };
        match timeout(PATIENCE, probe.metrics()).await {
            Ok(Ok(gauges)) => self.usage().set_gauges(gauges),
            // `hardware` reports that the driver does not work.
            Ok(Err(failure)) => debug!("the agent does not know what the driver measures: {failure}"),
            Err(_) => debug!(
                "the agent does not know what the driver measures: no answer in {} s",
                PATIENCE.as_secs()
            ),
        }
    }

    /// Bring the accounts up to date.
    async fn account(&self) {
        let is_any = self.usage().grants(self.core().records());
        if is_any {
            self.account_memory(self.processes().await.as_deref());
        }
    }

    /// Bring the accounts up to date if the driver has just been asked for the processes and the accounts are due.
    pub(crate) fn account_if_due(&self, processes: Option<&[GpuProcesses]>) {
        if self.usage().is_due.swap(false, Ordering::Relaxed) && self.usage().grants(self.core().records()) {
            self.account_memory(processes);
        }
    }

    fn account_memory(&self, processes: Option<&[GpuProcesses]>) {
        match processes {
            Some(processes) => self.usage().memory(processes),
            None => {
                for uuid in self.granted_gpus() {
                    self.usage().memory_is_unknown(&uuid);
                }
            }
        }
    }
}
