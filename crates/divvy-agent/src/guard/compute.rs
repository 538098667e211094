//! The compute time of pods: what they have left of it, in the files of their shares.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use divvy_share::USAGE;
use divvy_share::compute::{Meter, total};
use divvy_share::limits::Limits;
use tracing::warn;

use super::{Known, Shares, limits_in, read_slots, write_limits};

impl Shares {
    /// Return the UUIDs of the GPUs on which the compute time of a pod is limited.
    pub(crate) fn timed_gpus(&self) -> BTreeSet<String> {
        let known = self.known();
        let timed = known.shares.keys().filter(|share| timed(&self.directory(share)).is_some());
        timed.map(|(_, uuid)| uuid.clone()).collect()
    }

    /// Write what the pods have left of their compute time on a GPU, after they kept it busy for so many nanoseconds, by their UIDs. `now` is in nanoseconds
    /// of the monotonic clock.
    pub(crate) fn kept_busy(&self, uuid: &str, busy: &BTreeMap<String, u64>, now: u64) {
        let mut known = self.known();
        let Known { shares, meters, .. } = &mut *known;
        for share in shares.keys().filter(|(_, of)| of == uuid) {
            let directory = self.directory(share);
            let Some(Limits { rate, account, .. }) = timed(&directory) else {
                meters.remove(share);
                continue;
            };
            // A pod that has damaged its file keeps the time of a launch that was measured before.
            let launches = match read_slots(&directory.join(USAGE)) {
                Ok((_, slots, _)) => total(slots.iter().map(|slot| slot.launches)),
                Err(_) => account.launches,
            };
            let meter = meters.entry(share.clone()).or_insert_with(|| match account.at {
                // Nothing was measured yet.
                0 => Meter::new(now, launches),
                // By an earlier agent.
                _ => Meter::resume(account),
            });
            let account = meter.measure(rate, now, busy.get(&share.0).copied().unwrap_or(0), launches);
            if let Err(error) = write_limits(&directory, |limits| limits.account = account) {
                warn!(uid = share.0, gpu = uuid, "{error}");
            }
        }
    }
}

/// Return the limits in a directory if they limit the compute time. A file that cannot be read is written again when a container of the pod starts.
pub(super) fn timed(directory: &Path) -> Option<Limits> {
    limits_in(directory).filter(Limits::limits_compute)
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;
    use std::fs;
    use std::os::unix::ffi::OsStringExt as _;
    use std::sync::atomic::{AtomicU64, Ordering};
    use std::sync::mpsc;
    use std::time::{Duration, Instant};

    use divvy_agent_core::Guarded;
    use divvy_shadow::sys;
    use divvy_share::LIMITS;
    use divvy_share::limits::{self, Account, WHOLE};
    use divvy_share::usage;

    use super::super::tests::share_of;
    use super::*;

    const GPU: &str = "GPU-1";
    const MS: u64 = 1_000_000;

    struct Bed {
        state: tempfile::TempDir,
        shares: Shares,
    }

    impl Bed {
        /// Two pods, of which only the first one has a rate: 30 %.
        fn new() -> Bed {
            let state = tempfile::tempdir().expect("temp dir");
            let shares = Shares::open(state.path(), false).expect("opened");
            let bed = Bed { state, shares };
            for pod in ["a", "b"] {
                bed.shares.hold(pod, &share_of(1000)).expect("made");
            }
            bed.rate("a", 30);
            bed
        }

        fn directory(&self, pod: &str) -> std::path::PathBuf {
            self.state.path().join("shares").join(pod).join(GPU)
        }

        fn rate(&self, pod: &str, percent: u64) {
            write_limits(&self.directory(pod), |limits| limits.rate = percent * WHOLE / 100).expect("written");
        }

        fn account(&self, pod: &str) -> Account {
            let bytes = fs::read(self.directory(pod).join(LIMITS)).expect("read");
            Limits::from_bytes(&bytes).expect("readable").1.account
        }

        /// Say that the pod has made so many launches, in its second slot.
        fn launches(&self, pod: &str, count: u64) {
            let mut file = usage::file();
            let at = 64 + 64 + 5 * 8;
            file[at..at + 8].copy_from_slice(&count.to_ne_bytes());
            fs::write(self.directory(pod).join(USAGE), file).expect("written");
        }

        fn busy(&self, shares: &Shares, ms: u64, now: u64) -> Account {
            let busy = BTreeMap::from([("a".to_owned(), ms * MS), ("b".to_owned(), 70 * MS)]);
            shares.kept_busy(GPU, &busy, now * MS);
            self.account("a")
        }
    }

    #[test]
    fn only_a_pod_with_a_rate_is_measured() {
        let bed = Bed::new();
        assert_eq!(bed.shares.timed_gpus(), BTreeSet::from([GPU.to_owned()]));
        bed.busy(&bed.shares, 10, 1000);
        assert_eq!(bed.account("b"), Account::default());
        bed.shares.kept_busy("GPU-2", &BTreeMap::new(), MS);
        let before = bed.account("a");
        for rate in [0, 100] {
            bed.rate("a", rate);
            bed.shares.kept_busy(GPU, &BTreeMap::new(), MS);
            assert_eq!(bed.account("a"), before, "{rate}");
            assert!(bed.shares.known().meters.is_empty(), "{rate}");
            assert_eq!(bed.shares.timed_gpus(), BTreeSet::new(), "{rate}");
        }
    }

    #[test]
    fn busy_time_and_launches_are_in_the_account_and_another_agent_continues_with_it() {
        let bed = Bed::new();
        bed.launches("a", 7);
        let first = bed.busy(&bed.shares, 10, 1000);
        let (balance, at) = (-10 * MS as i64, 1000 * MS);
        assert_eq!(
            first,
            Account {
                balance,
                at,
                launches: 7,
                launch_ns: 0
            },
            "the launches were before the measurement"
        );
        bed.launches("a", 27);
        let second = Account {
            balance: (-10 + 30 - 100) * MS as i64,
            at: 1100 * MS,
            launches: 27,
            launch_ns: 110 * MS / 20,
        };
        assert_eq!(bed.busy(&bed.shares, 100, 1100), second);
        let later = Shares::open(bed.state.path(), false).expect("opened");
        assert_eq!(later.timed_gpus().len(), 1);
        let third = bed.busy(&later, 80, 1200);
        assert_eq!((third.balance, third.launches), ((-80 + 30 - 80) * MS as i64, 27));
        let [share] = share_of(500);
        bed.shares.hold("a", &[Guarded { cores: 30, ..share }]).expect("written");
        assert_eq!(bed.account("a"), third, "another container of the pod starts");
    }

    /// The process that waits is a thread here, which waits as a guard does.
    #[test]
    fn a_measurement_wakes_what_waits_for_it() {
        const LONG: u64 = 20_000 * MS;
        let bed = Bed::new();
        let path = CString::new(bed.directory("a").join(LIMITS).into_os_string().into_vec()).expect("no zero");
        let file = sys::open(&path, false, limits::SIZE).expect("opened");
        let words: &'static [AtomicU64; limits::WORDS] = sys::map(&file, false).expect("mapped");
        for round in 0..2 {
            let (started, thread_of) = mpsc::channel();
            let waiting = std::thread::spawn(move || {
                let Ok((generation, _)) = Limits::parse(&words.each_ref().map(|word| word.load(Ordering::Acquire))) else {
                    panic!("the limits are readable");
                };
                let bell = limits::bell(generation + 1);
                let seen = words[bell / 8].load(Ordering::Acquire) as u32;
                let since = Instant::now();
                started
                    .send(fs::read_link("/proc/thread-self").expect("its directory"))
                    .expect("heard");
                sys::wait(words, bell, seen, LONG);
                since.elapsed()
            });
            let stat = Path::new("/proc").join(thread_of.recv().expect("started")).join("stat");
            let asleep = || fs::read_to_string(&stat).is_ok_and(|stat| stat.contains(") S "));
            while !asleep() {
                std::thread::yield_now();
            }
            bed.busy(&bed.shares, 10, 1000 + 100 * round);
            let waited = waiting.join().expect("it ends");
            assert!(waited < Duration::from_nanos(LONG), "{waited:?}");
        }
    }

    #[test]
    fn a_pod_that_damages_its_files_is_measured_nevertheless() {
        let bed = Bed::new();
        bed.launches("a", 7);
        bed.busy(&bed.shares, 0, 1000);
        for damage in [vec![0xff; 100], vec![0; usage::SIZE]] {
            fs::write(bed.directory("a").join(USAGE), damage).expect("damaged");
            let before = bed.account("a");
            let after = bed.busy(&bed.shares, 10, before.at / MS + 100);
            assert_eq!((after.launches, after.launch_ns), (7, 0));
            assert!(after.at > before.at);
        }
        // A file of limits that cannot be read does not become one without memory.
        fs::write(bed.directory("a").join(LIMITS), [7; 256]).expect("damaged");
        bed.shares.kept_busy(GPU, &BTreeMap::new(), MS);
        assert_eq!(fs::read(bed.directory("a").join(LIMITS)).expect("read"), [7; 256]);
    }

    #[test]
    fn the_account_of_a_pod_that_is_gone_is_forgotten() {
        let bed = Bed::new();
        bed.busy(&bed.shares, 10, 1000);
        bed.shares.clear(&["a".to_owned()].into());
        bed.shares.kept_busy(GPU, &BTreeMap::new(), MS);
        assert!(bed.shares.known().meters.is_empty() && !bed.directory("a").exists());
    }
}
