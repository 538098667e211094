//! Samples of the processes' utilization, as a driver takes them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use divvy_gpu_sim::Work;

/// How many samples back the driver looks for the latest one of a process.
const KEPT: u64 = 16;

/// How busy a GPU was with one process, from the sample before to this one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct BusySample {
    pub(crate) pid: u32,
    /// When the sample was taken, in microseconds since 1970.
    pub(crate) at: u64,
    pub(crate) percent: u32,
}

/// One moment on two clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SampleMoment {
    /// Since 1970.
    pub(crate) real: Duration,
    /// On the monotonic clock, which the ledger has.
    pub(crate) monotonic: Duration,
}

impl SampleMoment {
    pub(crate) fn read() -> SampleMoment {
        SampleMoment {
            real: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default(),
            monotonic: divvy_gpu_sim::monotonic(),
        }
    }
}

/// Return the latest sample of each process that is newer than `since`, in microseconds since 1970. A process on which the GPU spent less than half a
/// percent of a sample's time has none. `constant` are processes that always keep the GPU equally busy, by PID, in percent.
pub(crate) fn latest(
    constant: &BTreeMap<u32, u32>,
    work: &[Work],
    period_ms: u64,
    now: &SampleMoment,
    since: u64,
) -> Vec<BusySample> {
    let period = period_ms.saturating_mul(1_000_000);
    let age = (now.real.as_nanos() % u128::from(period.max(1))) as u64;
    let newest = (now.real.as_nanos() as u64).saturating_sub(age);
    let monotonic = (now.monotonic.as_nanos() as u64).saturating_sub(age);
    let mut found = BTreeMap::new();
    for back in 0..KEPT {
        let ago = back.saturating_mul(period);
        let at = newest.saturating_sub(ago) / 1000;
        if at <= since {
            break;
        }
        let end = monotonic.saturating_sub(ago);
        let mut percent = constant.clone();
        for of in work {
            let busy = of.between(end.saturating_sub(period), end);
            let part = busy.saturating_mul(100).saturating_add(period / 2) / period.max(1);
            *percent.entry(of.pid).or_default() += part as u32;
        }
        for (pid, percent) in percent.into_iter().filter(|(_, percent)| *percent > 0) {
            found.entry(pid).or_insert(BusySample { pid, at, percent });
        }
    }
    found.into_values().collect()
}

#[cfg(test)]
mod tests {
    use divvy_gpu_sim::GpuLedger;

    use super::*;

    const MS: u64 = 1_000_000;

    /// The real time when the monotonic clock was 0.
    const BOOT: Duration = Duration::from_secs(1_700_000_000);

    fn at(ms: u64) -> SampleMoment {
        let monotonic = Duration::from_millis(ms);
        SampleMoment {
            real: BOOT + monotonic,
            monotonic,
        }
    }

    fn micros(ms: u64) -> u64 {
        (BOOT.as_micros() as u64) + ms * 1000
    }

    #[test]
    fn each_process_has_its_latest_sample_with_its_part_of_the_time() {
        let dir = tempfile::tempdir().expect("a directory");
        let ledger = || GpuLedger::open(dir.path(), "GPU-1").expect("opened");
        let (mut first, mut second) = (ledger().claim().expect("claimed"), ledger().claim().expect("claimed"));
        // The first one from 1,050 to 1,250 ms, the second one from 1,250 to 1,253 ms, and less than a percent later.
        first.run(1050 * MS, 200 * MS).expect("run");
        second.run(1050 * MS, 3 * MS).expect("run");
        second.run(1400 * MS, MS / 3).expect("run");
        second.run(1700 * MS, MS * 6 / 10).expect("run");
        let mut work = ledger().work().expect("read");
        // The processes of this test are one process.
        for (pid, of) in (1..).zip(&mut work) {
            of.pid = pid;
        }
        let sampled = |now, since| {
            let samples = latest(&BTreeMap::new(), &work, 100, &at(now), since);
            samples.into_iter().map(|of| (of.pid, of.at, of.percent)).collect::<Vec<_>>()
        };
        let (early, late) = ((1, micros(1200), 100), [(1, micros(1300), 50), (2, micros(1300), 3)]);
        assert_eq!(sampled(1099, 0), []);
        assert_eq!(sampled(1100, 0), [(1, micros(1100), 50)]);
        assert_eq!(sampled(1299, 0), [early]);
        assert_eq!(sampled(1350, 0), late);
        assert_eq!(sampled(1350, micros(1300) - 1), late);
        assert_eq!(sampled(1350, micros(1300)), [], "it was returned before");
        assert_eq!(sampled(1600, micros(1200)), late, "there is no sample below half a percent");
        assert_eq!(sampled(1800, micros(1700)), [(2, micros(1800), 1)], "rounded");
        assert_eq!(sampled(9000, 0), [], "it is forgotten");
    }

    #[test]
    fn a_process_of_the_description_is_always_as_busy() {
        let constant = BTreeMap::from([(7, 40), (8, 0)]);
        for now in [1000, 1999] {
            let samples = latest(&constant, &[], 1000, &at(now), 0);
            let [BusySample { pid, at, percent }] = samples[..] else {
                panic!("{samples:?}")
            };
            assert_eq!((pid, at, percent), (7, micros(1000), 40));
        }
    }
}
