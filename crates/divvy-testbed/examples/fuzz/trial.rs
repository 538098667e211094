//! One target, given inputs until its time is over.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use super::Target;
use super::arguments::Limits;
use super::chance::Chance;

/// Of the processor's time that one input may take, in a debug build: a hundred times what the good ones do. What takes longer grows faster than
/// its input.
const LONGEST: Duration = Duration::from_secs(3);
/// What takes as long does not end.
const ENDLESS: Duration = Duration::from_secs(60);
/// Inputs that are changed further, at most.
const CORPUS: usize = 200;
/// Bytes of one of those, at most, where the good ones have fewer than half of it: what is long is slow, and all targets have theirs in memory.
const KEPT: usize = 1 << 13;

/// What a target did.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tally {
    pub(crate) read: u64,
    pub(crate) refused: u64,
    /// Of the processor's.
    pub(crate) time: Duration,
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

/// What this thread has had of the processor: other targets have it, too.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

/// Keeps an input, and says where.
pub(crate) fn keep(name: &str, input: &[u8]) -> PathBuf {
    let word = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let path = std::env::temp_dir().join(format!("divvy-fuzz-{}-{word}", std::process::id()));
    match std::fs::write(&path, input) {
        Ok(()) => path,
        // The seed finds it again.
        Err(error) => format!("{} (which could not be written: {error})", path.display()).into(),
    }
}

/// Until the limits of this target, or `over` when that is for all. The error is which input broke a rule.
pub(crate) fn run(target: Target, limits: &Limits, seed: u64, over: &AtomicBool, seen: &Seen) -> Result<Tally, String> {
    let Target { name, read, good } = target;
    seen.begin();
    let mut corpus = good;
    let kept = corpus.iter().map(|input| 2 * input.len()).max().unwrap_or(0).max(KEPT);
    let try_it = |input: &[u8]| {
        seen.reads(input);
        let before = cpu_time();
        let outcome = catch_unwind(AssertUnwindSafe(|| read(input))).map_err(|cause| {
            let cause = cause
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| cause.downcast_ref().copied());
            cause.unwrap_or("a panic").to_owned()
        })?;
        let took = cpu_time().saturating_sub(before);
        match took > LONGEST {
            true => Err(format!("{} bytes took {} ms", input.len(), took.as_millis())),
            false => Ok(outcome),
        }
    };
    for (number, input) in corpus.iter().enumerate() {
        match try_it(input) {
            Ok(true) => {}
            Ok(false) => return Err(format!("{name}: good input {number} is refused")),
            Err(cause) => return Err(format!("{name}: good input {number} breaks a rule: {cause}")),
        }
    }
    let (mut chance, mut read, mut refused) = (Chance(seed.max(1)), 0_u64, 0_u64);
    loop {
        let time = cpu_time();
        if limits.each.is_some_and(|each| time >= each) || (over.load(Ordering::Relaxed) && time >= limits.at_least) {
            return Ok(Tally { read, refused, time });
        }
        let mut input = corpus[chance.below(corpus.len())].clone();
        for _ in 0..=chance.below(4) {
            chance.change(&mut input);
        }
        match try_it(&input) {
            Ok(false) => refused += 1,
            Ok(true) => {
                read += 1;
                if corpus.len() < CORPUS && input.len() < kept {
                    corpus.push(input);
                }
            }
            Err(cause) => return Err(format!("{name}: {} breaks a rule: {cause}", keep(name, &input).display())),
        }
    }
}
