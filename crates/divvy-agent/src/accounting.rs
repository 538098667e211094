//! Measures what the node's GPUs and the containers on them use.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use divvy_hardware::GpuProcesses;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep_until, timeout};
use tracing::debug;

use crate::clock::next_tick;
use crate::limiting::Limiting;
use crate::probe_access::ProbeAccess;
use crate::shared_core::SharedCore;
use crate::usage::KnownUsage;

/// The time between two measurements while the metrics are not read.
const PERIOD: Duration = Duration::from_secs(5);
/// A reader who comes within this time gets the values of the measurement before.
const FRESH: Duration = Duration::from_secs(1);
/// How long to wait for the driver.
const PATIENCE: Duration = Duration::from_secs(2);

/// The accounts of containers, and when they are to be brought up to date.
pub(crate) struct Accounting {
    core: Arc<SharedCore>,
    probe: Arc<ProbeAccess>,
    limiting: Arc<Limiting>,
    usage: KnownUsage,
    /// When the driver was asked last for what metrics show.
    asked: Mutex<Option<Instant>>,
    /// Whether the accounts are to be brought up to date with the processes that the next measurement of guarded pods finds.
    is_due: AtomicBool,
}

impl Accounting {
    pub(crate) fn new(core: Arc<SharedCore>, probe: Arc<ProbeAccess>, limiting: Arc<Limiting>) -> Accounting {
        Accounting {
            core,
            probe,
            limiting,
            usage: KnownUsage::default(),
            asked: Mutex::default(),
            is_due: AtomicBool::default(),
        }
    }

    /// Return what is known about the use of GPUs.
    pub(crate) fn usage(&self) -> &KnownUsage {
        &self.usage
    }

    /// Measure what containers use, while there are any, so that short use is seen between two readers of the metrics.
    pub(crate) async fn keep(&self) {
        loop {
            sleep_until(next_tick(Instant::now(), PERIOD)).await;
            if self.limiting.shares.is_empty() {
                self.account().await;
            } else {
                self.is_due.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Measure for a reader of the metrics, unless that was done just now.
    pub(crate) async fn measure_for_metrics(&self) {
        let mut asked = self.asked.lock().await;
        if asked.is_some_and(|asked| asked.elapsed() < FRESH) {
            return;
        }
        *asked = Some(Instant::now());
        self.account().await;
        let Some(probe) = self.probe.get() else { return };
        match timeout(PATIENCE, probe.metrics()).await {
            Ok(Ok(gauges)) => self.usage.set_gauges(gauges),
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
        let is_any = self.usage.grants(self.core.lock().records());
        if is_any {
            self.account_memory(self.probe.processes().await.as_deref());
        }
    }

    /// Bring the accounts up to date if the driver has just been asked for the processes and the accounts are due.
    pub(crate) fn account_if_due(&self, processes: Option<&[GpuProcesses]>) {
        if self.is_due.swap(false, Ordering::Relaxed) && self.usage.grants(self.core.lock().records()) {
            self.account_memory(processes);
        }
    }

    fn account_memory(&self, processes: Option<&[GpuProcesses]>) {
        match processes {
            Some(processes) => self.usage.memory(processes),
            None => {
                for uuid in self.core.granted_gpus() {
                    self.usage.memory_is_unknown(&uuid);
                }
            }
        }
    }
}
