//! Measures the compute time of pods that have a limit of it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_hardware::{Code, Failure, GpuSamples, SamplesSince};
use rustix::time::{ClockId, clock_gettime};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::warn;

use crate::agent::Agent;
use crate::busy::Samples;

/// The time between two questions. It is less than the time between two samples of a driver, so that no answer has to sum up several samples of a process:
/// how drivers do this is not documented.
const PERIOD: Duration = Duration::from_millis(100);
/// How long to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time until a GPU that gives no samples is asked again.
const REFUSED: Duration = Duration::from_secs(1);

/// A GPU on which the compute time of a pod is limited.
#[derive(Debug, Default)]
struct Gpu {
    samples: Samples,
    /// Why it gives no samples, as it was logged, and when it is asked again.
    refused: Option<(String, Instant)>,
}

impl Gpu {
    fn is_asked(&self, now: Instant) -> bool {
        self.refused.as_ref().is_none_or(|(_, until)| *until <= now)
    }

    /// Note that the GPU gave no samples, and return whether this reason must be logged. A probe that cannot be reached is logged elsewhere.
    fn refuse(&mut self, failure: &Failure, now: Instant) -> bool {
        // A probe of an earlier version does not know the question.
        if !failure.code.is_refusal() && failure.code != Code::Protocol {
            return false;
        }
        let text = failure.to_string();
        let is_new = self.refused.as_ref().is_none_or(|(before, _)| *before != text);
        self.refused = Some((text, now + REFUSED));
        is_new
    }
}

impl Agent {
    /// Write again and again what pods have left of their compute time. Without such pods, wait for one.
    pub(crate) async fn keep_metering(self: &Arc<Self>) {
        let mut gpus: BTreeMap<String, Gpu> = BTreeMap::new();
        loop {
            let timed = self.blocking(|agent| agent.shares().timed_gpus()).await.unwrap_or_default();
            gpus.retain(|uuid, _| timed.contains(uuid));
            for uuid in timed {
                gpus.entry(uuid).or_default();
            }
            if gpus.is_empty() {
                self.timed.notified().await;
            }
            let mut is_known = true;
            while is_known && !gpus.is_empty() {
                let next = Instant::now() + PERIOD;
                let all = self.meter(&mut gpus).await;
                is_known = tokio::select! {
                    // Without a measurement, nothing shows that the last pod with a limit has ended.
                    () = sleep_until(next) => all,
                    () = self.timed.notified() => false,
                };
            }
        }
    }

    /// Ask the driver once, and write what it says. GPUs without a limit are removed from the list. Return whether all GPUs have answered.
    async fn meter(self: &Arc<Self>, gpus: &mut BTreeMap<String, Gpu>) -> bool {
        let Some(probe) = self.probe() else { return false };
        let now = Instant::now();
        let since_1970 = micros(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        let asked = gpus.iter_mut().filter(|(_, gpu)| gpu.is_asked(now));
        let asked: Vec<SamplesSince> = asked
            .map(|(uuid, gpu)| SamplesSince {
                uuid: uuid.clone(),
                since: gpu.samples.since(since_1970),
            })
            .collect();
        if asked.is_empty() {
            return false;
        }
        let mut all = asked.len() == gpus.len();
        let uuids: Vec<String> = asked.iter().map(|of| of.uuid.clone()).collect();
        let late = |_| Err(Failure::new(Code::Timeout, format!("no answer in {} s", PATIENCE.as_secs())));
        let answer = timeout(PATIENCE, probe.utilization(asked)).await.unwrap_or_else(late);
        let answer = answer.unwrap_or_else(|failure| {
            let failed = |uuid| GpuSamples {
                uuid,
                samples: Vec::new(),
                error: Some(failure.clone()),
            };
            uuids.into_iter().map(failed).collect()
        });
        let clock = clock_gettime(ClockId::Monotonic);
        let monotonic = Duration::try_from(clock).unwrap_or_default();
        let mut busy = Vec::new();
        for GpuSamples { uuid, samples, error } in answer {
            let Some(gpu) = gpus.get_mut(&uuid) else { continue };
            if let Some(failure) = error {
                if gpu.refuse(&failure, now) {
                    warn!(gpu = uuid, "nothing limits the compute time of pods on this GPU: {failure}");
                }
                self.shares().timed(&uuid, gpu.refused.as_ref().map(|(text, _)| text.clone()));
                all = false;
                continue;
            }
            if gpu.refused.take().is_some() {
                self.shares().timed(&uuid, None);
            }
            busy.extend(gpu.samples.take(&samples, micros(monotonic)).map(|pods| (uuid, pods)));
        }
        let monotonic = u64::try_from(monotonic.as_nanos()).unwrap_or(u64::MAX);
        let written = self.blocking(move |agent| {
            busy.retain(|(uuid, pods)| !agent.shares().kept_busy(uuid, pods, monotonic));
            busy
        });
        for (uuid, _) in written.await.unwrap_or_default() {
            gpus.remove(&uuid);
        }
        all
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_gives_no_samples_is_asked_once_a_second_and_each_reason_is_logged_once() {
        let failure = |code, text: &str| Failure::new(code, text);
        let mut gpu = Gpu::default();
        let now = Instant::now();
        assert!(!gpu.refuse(&failure(Code::Timeout, "late"), now));
        assert!(gpu.is_asked(now), "the probe may be there again");
        assert!(gpu.refuse(&failure(Code::NotSupported, "MIG"), now));
        assert!(!gpu.is_asked(now + REFUSED / 2) && gpu.is_asked(now + REFUSED));
        assert!(!gpu.refuse(&failure(Code::NotSupported, "MIG"), now + REFUSED));
        assert!(!gpu.is_asked(now + REFUSED * 3 / 2));
        assert!(gpu.refuse(&failure(Code::GpuLost, "lost"), now + REFUSED * 2));
        assert!(Gpu::default().refuse(&failure(Code::Protocol, "unknown variant"), now));
    }
}
