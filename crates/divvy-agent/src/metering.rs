//! Measures for how long containers keep their GPUs busy: for the limits of compute time, and for the metrics.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_hardware::{Failure, FailureCode, GpuSamples, SamplesSince};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::{info, warn};

use crate::accounting::Accounting;
use crate::busy::SampleTimes;
use crate::clock::{monotonic, nanos, next_tick};
use crate::limiting::Limiting;
use crate::probe_access::ProbeAccess;
use crate::shared_core::SharedCore;

/// The time between two questions about a GPU on which compute time is limited. It is less than the time between two samples of a driver, so that no answer
/// has to sum up several samples of a process: how drivers do this is not documented.
const LIMITED: Duration = Duration::from_millis(100);
/// The same for another GPU on which a container has a grant. It is also the time after which new grants are looked for, if nothing says that there are some.
const GRANTED: Duration = Duration::from_secs(2);
/// How long to wait for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// The time until a GPU that gives no samples is asked again.
const REFUSED: [Duration; 2] = [Duration::from_secs(60), Duration::from_secs(1)];

/// A GPU on which a container has a grant.
#[derive(Debug)]
struct MeteredGpu {
    samples: SampleTimes,
    /// Whether the compute time of a pod is limited.
    is_limited: bool,
    /// When it is asked next.
    next: Instant,
    /// When busy times were known last, on the monotonic clock.
    told: Option<Duration>,
    /// Why it gives no samples, as it was logged, and whether compute time was limited then.
    refused: Option<(String, bool)>,
}

impl MeteredGpu {
    fn new(now: Instant) -> MeteredGpu {
        MeteredGpu {
            samples: SampleTimes::default(),
            is_limited: false,
            next: now,
            told: None,
            refused: None,
        }
    }

    /// Set whether compute time is limited. Then the GPU is asked more often, from now on.
    fn limit(&mut self, is_limited: bool, now: Instant) {
        if is_limited && !self.is_limited {
            self.next = now;
        }
        self.is_limited = is_limited;
    }

    fn ask(&mut self, now: Instant) {
        let period = if self.is_limited { LIMITED } else { GRANTED };
        // One question is about all GPUs.
        self.next = next_tick(now, period);
    }

    /// Note that the GPU gave no samples, and return whether this reason must be logged. A probe that cannot be reached is logged elsewhere.
    fn refuse(&mut self, failure: &Failure, now: Instant) -> bool {
        // A probe of an earlier version does not know the question.
        if !failure.code.is_refusal() && failure.code != FailureCode::Protocol {
            return false;
        }
        self.next = now + REFUSED[usize::from(self.is_limited)];
        let refused = (failure.to_string(), self.is_limited);
        self.refused.replace(refused.clone()) != Some(refused)
    }
}

/// Asks the driver for the busy time of containers, and passes it on.
pub(crate) struct Metering {
    core: Arc<SharedCore>,
    probe: Arc<ProbeAccess>,
    limiting: Arc<Limiting>,
    accounting: Arc<Accounting>,
    /// By the GPU's UUID.
    gpus: BTreeMap<String, MeteredGpu>,
}

impl Metering {
    pub(crate) fn new(
        core: Arc<SharedCore>,
        probe: Arc<ProbeAccess>,
        limiting: Arc<Limiting>,
        accounting: Arc<Accounting>,
    ) -> Metering {
        Metering {
            core,
            probe,
            limiting,
            accounting,
            gpus: BTreeMap::new(),
        }
    }

    /// Measure again and again. Without a container that has a grant, wait for one.
    pub(crate) async fn run(mut self) {
        loop {
            let mut wanted = self.core.granted_gpus();
            let limited = self.limiting.shares.timed_gpus();
            wanted.extend(limited.iter().cloned());
            self.gpus.retain(|uuid, _| wanted.contains(uuid));
            let now = Instant::now();
            for uuid in wanted {
                let is_limited = limited.contains(&uuid);
                self.gpus
                    .entry(uuid)
                    .or_insert_with(|| MeteredGpu::new(now))
                    .limit(is_limited, now);
            }
            if self.gpus.is_empty() {
                self.limiting.timed.notified().await;
                continue;
            }
            let until = next_tick(now, GRANTED);
            loop {
                let first = self.gpus.values().map(|gpu| gpu.next).min().unwrap_or(until);
                tokio::select! {
                    () = sleep_until(first.min(until)) => {}
                    () = self.limiting.timed.notified() => break,
                }
                if first > until {
                    break;
                }
                self.meter().await;
            }
        }
    }

    /// Ask the driver once about the GPUs whose time has come, and write what it says.
    async fn meter(&mut self) {
        let now = Instant::now();
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let mut asked = Vec::new();
        for (uuid, gpu) in self.gpus.iter_mut().filter(|(_, gpu)| gpu.next <= now) {
            gpu.ask(now);
            asked.push(SamplesSince {
                uuid: uuid.clone(),
                since: gpu.samples.since(micros(since_1970)),
            });
        }
        let Some(probe) = self.probe.get().filter(|_| !asked.is_empty()) else {
            return;
        };
        let uuids: Vec<String> = asked.iter().map(|of| of.uuid.clone()).collect();
        let late = |_| {
            Err(Failure::new(
                FailureCode::Timeout,
                format!("no answer in {} s", PATIENCE.as_secs()),
            ))
        };
        let answer = timeout(PATIENCE, probe.utilization(asked)).await.unwrap_or_else(late);
        let answer = answer.unwrap_or_else(|failure| {
            let failed = |uuid| GpuSamples {
                uuid,
                samples: Vec::new(),
                error: Some(failure.clone()),
            };
            uuids.into_iter().map(failed).collect()
        });
        let monotonic = monotonic();
        let mut measured = BTreeMap::new();
        for GpuSamples { uuid, samples, error } in answer {
            let Some(gpu) = self.gpus.get_mut(&uuid) else { continue };
            if let Some(failure) = error {
                match (gpu.refuse(&failure, now), gpu.is_limited) {
                    (true, true) => warn!(gpu = uuid, "nothing limits the compute time of pods on this GPU: {failure}"),
                    (true, false) => info!(
                        gpu = uuid,
                        "the time for which containers keep this GPU busy is not measured: {failure}"
                    ),
                    (false, _) => {}
                }
                if gpu.refused.is_some() {
                    gpu.told = None;
                    self.accounting.usage().busy_is_unknown(&uuid);
                }
                if gpu.is_limited {
                    self.limiting
                        .shares
                        .timed(&uuid, gpu.refused.as_ref().map(|(text, _)| text.clone()));
                }
                continue;
            }
            if gpu.refused.take().is_some() {
                self.limiting.shares.timed(&uuid, None);
            }
            let Some(busy) = gpu.samples.take(&samples, micros(monotonic)) else {
                continue;
            };
            let passed = gpu.told.replace(monotonic).map(|told| monotonic.saturating_sub(told));
            let passed = passed.map(nanos);
            self.accounting.usage().busy(&uuid, &busy, passed, since_1970.as_secs());
            let mut pods: BTreeMap<String, u64> = BTreeMap::new();
            for ((pod, _), ns) in busy {
                *pods.entry(pod).or_default() += ns;
            }
            if gpu.is_limited {
                measured.insert(uuid, pods);
            }
        }
        if measured.is_empty() {
            return;
        }
        let monotonic = nanos(monotonic);
        self.limiting.shares.kept_busy(&measured, monotonic).await;
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The agent logs each reason for missing samples once.
    #[test]
    fn a_gpu_without_samples_is_asked_less_often() {
        let failure = |code, text: &str| Failure::new(code, text);
        let now = Instant::now();
        for (is_limited, usual, refused) in [
            (true, LIMITED, Duration::from_secs(1)),
            (false, GRANTED, Duration::from_secs(60)),
        ] {
            let mut gpu = MeteredGpu::new(now);
            gpu.limit(is_limited, now);
            gpu.ask(now);
            assert!(!gpu.refuse(&failure(FailureCode::Timeout, "late"), now));
            assert_eq!(gpu.next, next_tick(now, usual), "the probe may be there again");
            assert!(gpu.refuse(&failure(FailureCode::NotSupported, "MIG"), now));
            assert_eq!(gpu.next, now + refused);
            assert!(!gpu.refuse(&failure(FailureCode::NotSupported, "MIG"), now + refused));
            assert!(gpu.refuse(&failure(FailureCode::NotSupported, "Kepler"), now + refused));
        }
    }

    #[test]
    fn gpus_with_containers_of_different_ages_are_asked_together() {
        let began = next_tick(Instant::now(), GRANTED);
        let asked = |ms, is_limited| {
            let now = began + Duration::from_millis(ms);
            let mut gpu = MeteredGpu::new(now);
            gpu.limit(is_limited, now);
            gpu.ask(now);
            (gpu.next - began).as_millis()
        };
        assert_eq!([0, 1, 400, 1999].map(|ms| asked(ms, false)), [2000; 4]);
        assert_eq!([2000, 2001].map(|ms| asked(ms, false)), [4000; 2]);
        assert_eq!([900, 950, 999].map(|ms| asked(ms, true)), [1000; 3]);
    }

    /// If the GPU refuses after such a limit is set, the agent logs the refusal again.
    #[test]
    fn a_new_compute_time_limit_asks_the_gpu_at_once() {
        let now = Instant::now();
        let mut gpu = MeteredGpu::new(now);
        gpu.ask(now);
        let failure = Failure::new(FailureCode::NotSupported, "MIG");
        assert!(gpu.refuse(&failure, now));
        gpu.limit(true, now);
        assert_eq!(gpu.next, now);
        assert!(gpu.refuse(&failure, now), "now it means that nothing limits the time");
        gpu.limit(true, now);
        assert_eq!(gpu.next, now + REFUSED[1]);
    }
}
