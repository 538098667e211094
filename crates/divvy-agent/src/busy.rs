//! For how long each container kept a GPU busy, from the driver's samples.
//!
//! A driver takes a sample each 1/6 s to 1 s, depending on the GPU (nvml.h, nvmlUtilization_t). A sample says for which part of the time since the one
//! before a process kept the GPU busy. A process that did not use the GPU has no sample. While the GPU is idle, there are no
//! samples at all, and the first one after a pause does not say how much time it covers.

use std::collections::BTreeMap;

use divvy_hardware::UtilizationSample;

/// A container: its pod's UID, and the container runtime's ID, if it is known.
pub(crate) type BusyOwner = (String, Option<String>);

/// The time between two samples as long as it is not known, in microseconds.
const USUAL: u64 = 1_000_000 / 6;
/// Its limits. What is shorter than the time between two questions makes no difference.
const SHORTEST: u64 = 100_000;
const LONGEST: u64 = 1_000_000;

/// What is known about the samples of one GPU. Times are in microseconds, those of samples since 1970, and those of answers on the monotonic clock.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct SampleTimes {
    /// When the latest sample was taken.
    last: Option<u64>,
    /// The shortest time between two samples so far, within the limits.
    period: Option<u64>,
    /// When the driver answered last.
    answered: Option<u64>,
    /// When the last busy times were returned.
    told: Option<u64>,
}

impl SampleTimes {
    /// Return the time since which samples are of interest. `now` is in microseconds since 1970. Older samples are not, because some drivers return the mean
    /// of all samples of a process.
    pub(crate) fn since(&mut self, now: u64) -> u64 {
        // The clock was set back. With the old time, the driver would return nothing until the clock is there again.
        self.last = self.last.filter(|last| *last <= now);
        self.last.unwrap_or(0).max(now.saturating_sub(LONGEST))
    }

    /// Take an answer that came at the time `now`. Return for how many nanoseconds each container kept the GPU busy since the last time that this was
    /// returned, only of containers that used the GPU. Return `None` while the driver may still have to take its next sample.
    pub(crate) fn take(&mut self, samples: &[UtilizationSample], now: u64) -> Option<BTreeMap<BusyOwner, u64>> {
        let unanswered = self.answered.map_or(0, |before| now.saturating_sub(before));
        self.answered = Some(now);
        let mut percent: BTreeMap<u64, BTreeMap<&str, BTreeMap<Option<&str>, u64>>> = BTreeMap::new();
        for sample in samples.iter().filter(|sample| Some(sample.at) > self.last) {
            let pods = percent.entry(sample.at).or_default();
            if let Some(pod) = &sample.pod {
                let containers = pods.entry(pod).or_default();
                *containers.entry(sample.container.as_deref()).or_default() += u64::from(sample.percent);
            }
        }
        let period = self.period.unwrap_or(USUAL);
        let quiet = self.told.is_none_or(|told| now.saturating_sub(told) >= 2 * period);
        if percent.is_empty() && !quiet {
            return None;
        }
        self.told = Some(now);
        let mut busy: BTreeMap<BusyOwner, u64> = BTreeMap::new();
        for (at, pods) in percent {
            let passed = self.last.map(|last| at - last);
            if let Some(passed) = passed {
                let period = passed.clamp(SHORTEST, LONGEST);
                self.period = Some(self.period.map_or(period, |before| before.min(period)));
            }
            self.last = Some(at);
            // The GPU was idle before, or the driver was not asked for some time and has returned only its latest sample.
            let most = self.period.unwrap_or(USUAL).max(unanswered);
            let about = passed.map_or(most, |passed| passed.min(most));
            for (pod, containers) in pods {
                // Several processes together cannot have more than the whole GPU.
                let whole = containers.values().sum::<u64>().max(100);
                for (container, percent) in containers {
                    let ns = about.saturating_mul(1000).saturating_mul(percent) / whole;
                    let sum = busy.entry((pod.to_owned(), container.map(str::to_owned))).or_default();
                    *sum = sum.saturating_add(ns);
                }
            }
        }
        Some(busy)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1000;
    /// The time since 1970 when the monotonic clock was 0.
    const BOOT: u64 = 1_700_000_000_000_000;

    fn sample(pod: &str, at: u64, percent: u32) -> UtilizationSample {
        UtilizationSample {
            pid: 1,
            pod: (!pod.is_empty()).then(|| pod.to_owned()),
            container: None,
            at: BOOT + at * MS,
            percent,
        }
    }

    /// What an answer says, in milliseconds.
    fn take(of: &mut SampleTimes, samples: &[UtilizationSample], now: u64) -> Option<Vec<(String, u64)>> {
        let busy = of.take(samples, now * MS)?;
        Some(busy.into_iter().map(|((pod, _), ns)| (pod, ns / 1_000_000)).collect())
    }

    fn is(busy: &[(&str, u64)]) -> Option<Vec<(String, u64)>> {
        Some(busy.iter().map(|(pod, ms)| ((*pod).to_owned(), *ms)).collect())
    }

    /// A GPU that had samples at 1,000 and 1,200 ms, and answered at 1,210 ms.
    fn sampled() -> SampleTimes {
        let mut of = SampleTimes::default();
        of.take(&[sample("", 1000, 1), sample("", 1200, 1)], 1210 * MS)
            .expect("samples");
        of
    }

    #[test]
    fn a_sample_is_about_the_time_since_the_one_before() {
        type Case<'a> = (&'a str, &'a [UtilizationSample], u64, Option<Vec<(String, u64)>>);
        let cases: &[Case<'_>] = &[
            ("one pod", &[sample("a", 1400, 30)], 1410, is(&[("a", 60)])),
            (
                "two pods",
                &[sample("a", 1400, 30), sample("b", 1400, 50)],
                1410,
                is(&[("a", 60), ("b", 100)]),
            ),
            (
                "two processes",
                &[sample("a", 1400, 30), sample("a", 1400, 20)],
                1410,
                is(&[("a", 100)]),
            ),
            (
                "more than the whole",
                &[sample("a", 1400, 90), sample("a", 1400, 90)],
                1410,
                is(&[("a", 200)]),
            ),
            ("a process of the host", &[sample("", 1400, 90)], 1410, is(&[])),
            (
                "two samples",
                &[sample("a", 1500, 50), sample("a", 1400, 10)],
                1510,
                is(&[("a", 70)]),
            ),
            (
                "another pod's sample between",
                &[sample("b", 1400, 100), sample("a", 1600, 50)],
                1610,
                is(&[("a", 100), ("b", 200)]),
            ),
            ("one that is known", &[sample("a", 1200, 90)], 1410, None),
            ("none yet", &[], 1410, None),
            ("none any more", &[], 1610, is(&[])),
            (
                "after a pause, not about the pause",
                &[sample("a", 9000, 50)],
                1310,
                is(&[("a", 100)]),
            ),
            (
                "after a time without answers, about that time",
                &[sample("a", 3000, 50)],
                3010,
                is(&[("a", 900)]),
            ),
        ];
        for (name, samples, now, expected) in cases {
            assert_eq!(take(&mut sampled(), samples, *now), *expected, "{name}");
        }
    }

    /// Each of a pod's containers has its own time.
    #[test]
    fn containers_together_have_at_most_the_whole_gpu() {
        let of_container = |container: &str, percent: u32| UtilizationSample {
            container: Some(container.to_owned()),
            ..sample("a", 1400, percent)
        };
        for ([one, two], expected) in [([30, 20], [60, 40]), ([100, 100], [100, 100]), ([90, 30], [150, 50])] {
            let busy = sampled().take(&[of_container("one", one), of_container("two", two)], 1410 * MS);
            let ms = |container: &str| busy.as_ref().expect("samples")[&("a".to_owned(), Some(container.to_owned()))] / 1_000_000;
            assert_eq!([ms("one"), ms("two")], expected);
        }
    }

    /// Before its first sample, a new GPU has no busy time.
    #[test]
    fn a_new_gpu_has_a_short_first_sample() {
        let mut of = SampleTimes::default();
        assert_eq!(of.since(BOOT), BOOT - LONGEST);
        assert_eq!(take(&mut of, &[], 0), is(&[]));
        assert_eq!(take(&mut of, &[], 100), None);
        assert_eq!(take(&mut of, &[sample("a", 150, 100)], 200), is(&[("a", 166)]));
        assert_eq!(of.since(BOOT + 200 * MS), BOOT + 150 * MS);
        // The driver's period is one second.
        assert_eq!(take(&mut of, &[sample("a", 1150, 100)], 1200), is(&[("a", 1000)]));
        assert_eq!(take(&mut of, &[], 2900), None, "the next one may be late");
        assert_eq!(of.since(BOOT + 60_000 * MS), BOOT + 59_000 * MS);
    }

    #[test]
    fn a_clock_that_was_set_back_does_not_stop_the_measurement() {
        let mut of = sampled();
        assert_eq!(of.since(BOOT - 5000 * MS), BOOT - 6000 * MS);
        let busy = of.take(
            &[UtilizationSample {
                at: BOOT - 5500 * MS,
                ..sample("a", 0, 100)
            }],
            1300 * MS,
        );
        assert_eq!(busy, Some(BTreeMap::from([(("a".to_owned(), None), 200_000_000)])));
    }

    proptest! {
        /// The driver samples at any period, the agent asks at any times, and whole periods are busy or idle.
        #[test]
        fn a_busy_pod_has_all_the_time_and_no_more(
            period in 100..1000_u64,
            pauses in prop::collection::vec(50..150_u64, 20..200),
        ) {
            let mut of = SampleTimes::default();
            let (mut now, mut asked, mut sum) = (10_000, 10_000, 0);
            of.take(&[], now * MS).expect("the first");
            for pause in pauses {
                now += pause;
                let since = of.since(BOOT + now * MS);
                let newest = now / period * period;
                let samples = (BOOT + newest * MS > since).then(|| sample("a", newest, 100));
                sum += take(&mut of, samples.as_slice(), now).map_or(0, |busy| busy.iter().map(|(_, ms)| ms).sum());
                asked = newest;
            }
            let all = asked - 10_000;
            prop_assert!(sum <= all + 2 * 1000 && sum + 2 * 1000 >= all, "{sum} of {all}");
        }

        #[test]
        fn no_answer_of_a_probe_is_too_much(samples in prop::collection::vec((any::<u64>(), any::<u32>()), 0..20), times in prop::collection::vec(any::<u64>(), 4)) {
            let mut of = SampleTimes::default();
            for now in times {
                of.since(now);
                let samples: Vec<UtilizationSample> = samples.iter().map(|(at, percent)| UtilizationSample { at: *at, percent: *percent, ..sample("a", 0, 0) }).collect();
                of.take(&samples, now);
            }
        }
    }
}
