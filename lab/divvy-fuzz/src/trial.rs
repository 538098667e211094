//! One target, given inputs until its time is over.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::arguments::Ends;
use divvy_fuzz::chance::Chance;
use divvy_fuzz::targets::{Target, cpu_time};

/// What takes as long does not end.
const ENDLESS: Duration = Duration::from_secs(60);
/// Inputs that are changed further, at most.
const CORPUS: usize = 200;
/// Bytes of one of those, at most, where the good ones have fewer than half of it: what is long is slow, and all targets have theirs in memory.
const KEPT: usize = 1 << 13;

/// What a target did.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) refused: u64,
    /// Processor time of all inputs.
    pub(crate) time: Duration,
    /// Processor time of the slowest input.
    pub(crate) slowest: Duration,
    /// Bytes that the most expensive input held at once.
    pub(crate) largest: u64,
}

/// An input, and the rule that it broke.
#[derive(Debug)]
pub(crate) struct Broken {
    pub(crate) input: Vec<u8>,
    pub(crate) why: String,
}

/// What others see of a target while it runs.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    /// The number of its thread; 0 before it has one.
    thread: AtomicU64,
    /// Nanoseconds of the processor's time that the thread had had when it began with `input`.
    since: AtomicU64,
    input: Mutex<Vec<u8>>,
}

impl Seen {
    fn begin(&self) {
        // PID/task/NUMBER; where there is no such file nobody looks.
        let task = std::fs::read_link("/proc/thread-self").ok();
        let number = task.and_then(|task| task.file_name()?.to_str()?.parse().ok());
        self.thread.store(number.unwrap_or(0), Ordering::Relaxed);
    }

    fn reads(&self, input: &[u8]) {
        let mut kept = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        kept.clear();
        kept.extend_from_slice(input);
        drop(kept);
        let now = u64::try_from(cpu_time().as_nanos()).unwrap_or(u64::MAX);
        self.since.store(now, Ordering::Relaxed);
    }

    /// The input that will not end, if it is one.
    pub(crate) fn endless(&self) -> Option<Vec<u8>> {
        let thread = self.thread.load(Ordering::Relaxed);
        // Before the file is read: what is newer than that is no older than it seems.
        let since = self.since.load(Ordering::Relaxed);
        let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
        let had: u64 = text.split(' ').next()?.parse().ok()?;
        let ended = had.saturating_sub(since) < u64::try_from(ENDLESS.as_nanos()).unwrap_or(u64::MAX);
        (thread != 0 && !ended).then(|| self.input.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Until this target has had its time, or until `over` when that is for all. The error is which input broke a rule.
pub(crate) fn run(target: &Target, ends: &Ends, seed: u64, over: &AtomicBool, seen: &Seen) -> Result<Tally, Broken> {
    seen.begin();
    let mut corpus: Vec<Vec<u8>> = target.seeds().cloned().collect();
    let kept = corpus.iter().map(|input| 2 * input.len()).max().unwrap_or(0).max(KEPT);
    let (mut chance, mut tally) = (Chance(seed.max(1)), Tally::default());
    loop {
        tally.time = cpu_time();
        if ends.each.is_some_and(|each| tally.time >= each) || (over.load(Ordering::Relaxed) && tally.time >= ends.at_least) {
            return Ok(tally);
        }
        let mut input = corpus[chance.below(corpus.len())].clone();
        for _ in 0..=chance.below(4) {
            chance.change(&mut input);
        }
        seen.reads(&input);
        match target.run(&input) {
            Ok(cost) => {
                tally.slowest = tally.slowest.max(cost.time);
                tally.largest = tally.largest.max(cost.bytes);
                match cost.accepted {
                    false => tally.refused += 1,
                    true => tally.accepted += 1,
                }
                if cost.accepted && corpus.len() < CORPUS && input.len() < kept {
                    corpus.push(input);
                }
            }
            Err(why) => {
                return Err(Broken { input, why });
            }
        }
    }
}
