//! A run of one target, which gets inputs until its time has passed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::arguments::EndConditions;
use divvy_fuzz::chance::Chance;
use divvy_fuzz::targets::{BrokenRule, FuzzTarget, cpu_time};

/// The time after which an input counts as endless.
const ENDLESS: Duration = Duration::from_secs(60);
/// The greatest number of inputs that are changed further.
const CORPUS: usize = 200;
/// The maximum length in bytes of an input that is kept to be changed further, unless twice the length of the longest seed is
/// more. Long inputs are slow, and all targets keep theirs in memory.
const KEPT: usize = 1 << 13;

/// The results of a target.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) refused: u64,
    /// The processor time of all inputs.
    pub(crate) time: Duration,
    /// The processor time of the slowest input.
    pub(crate) slowest: Duration,
    /// The bytes that the most expensive input held at once.
    pub(crate) largest: u64,
}

/// An input and the rule that it broke.
#[derive(Debug)]
pub(crate) struct FailedInput {
    pub(crate) input: Vec<u8>,
    pub(crate) why: BrokenRule,
}

/// The state of a running target that other threads see.
#[derive(Debug, Default)]
pub(crate) struct TargetState {
    /// The id of the target's thread; 0 before it has one.
    thread: AtomicU64,
    /// The thread's processor time in nanoseconds when it began with `input`.
    since: AtomicU64,
    input: Mutex<Vec<u8>>,
}

impl TargetState {
    fn begin(&self) {
        // The file is PID/task/NUMBER. If it does not exist, the check is omitted.
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

    /// Return the current input if it does not end.
    pub(crate) fn endless(&self) -> Option<Vec<u8>> {
        let thread = self.thread.load(Ordering::Relaxed);
        // Read before the file, so that the input cannot appear to have run longer than it has.
        let since = self.since.load(Ordering::Relaxed);
        let text = std::fs::read_to_string(format!("/proc/self/task/{thread}/schedstat")).ok()?;
        let had: u64 = text.split(' ').next()?.parse().ok()?;
        let ended = had.saturating_sub(since) < u64::try_from(ENDLESS.as_nanos()).unwrap_or(u64::MAX);
        (thread != 0 && !ended).then(|| self.input.lock().unwrap_or_else(PoisonError::into_inner).clone())
    }
}

/// Run a target until it has had its time, or until `over` is set, which ends all targets. The error is the input that broke a
/// rule.
pub(crate) fn run(
    target: &FuzzTarget,
    ends: EndConditions,
    seed: u64,
    over: &AtomicBool,
    seen: &TargetState,
) -> Result<Tally, FailedInput> {
    seen.begin();
    let mut corpus: Vec<Vec<u8>> = target.seeds().cloned().collect();
    let kept = corpus.iter().map(|input| 2 * input.len()).max().unwrap_or(0).max(KEPT);
    let (mut chance, mut tally) = (Chance(seed.max(1)), Tally::default());
    loop {
        tally.time = cpu_time();
        if ends.each.is_some_and(|each| tally.time >= each) || over.load(Ordering::Relaxed) {
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
                if cost.accepted {
                    tally.accepted += 1
                } else {
                    tally.refused += 1
                }
                if cost.accepted && corpus.len() < CORPUS && input.len() < kept {
                    corpus.push(input);
                }
            }
            Err(why) => {
                return Err(FailedInput { input, why });
            }
        }
    }
}
