//! The fuzz targets: all code that parses input from outside. This crate's programs run them, and its tests run their seeds.

mod cluster;
mod commands;
mod container;
mod extender;
mod host;
mod node;
mod pages;
mod programs;

use std::collections::BTreeSet;
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

type TargetReader = Box<dyn Fn(&[u8]) -> bool + Send>;

/// A parser of input from outside, with its rules.
#[expect(missing_debug_implementations, reason = "a target holds a closure")]
pub struct FuzzTarget {
    pub name: &'static str,
    /// Reads an input and reports whether it was accepted. Panics if a rule does not hold.
    read: TargetReader,
    /// Inputs that must be accepted. Fuzzing starts from them.
    pub accepted: Vec<Vec<u8>>,
    /// Inputs that must be refused, for code that only a refusal reaches. Fuzzing starts from them as well.
    pub refused: Vec<Vec<u8>>,
    limits: CostLimits,
}

/// The cost limits of one input. A cost above them shows that the cost grows faster than the input.
#[derive(Debug, Clone, Copy)]
pub struct CostLimits {
    /// Processor time for any input, in a debug build.
    pub time: Duration,
    /// Additional processor time per byte of the input.
    pub time_per_byte: Duration,
    /// Allocated memory that any input may hold at once.
    pub bytes: u64,
    /// Additional allocated memory per byte of the input.
    pub bytes_per_byte: u64,
}

/// The default limits. They are generous, since a parser takes microseconds for a seed of a kilobyte. They find costs that grow with the
/// square of the input, and values that are stored many times.
const LIMITS: CostLimits = CostLimits {
    time: Duration::from_millis(500),
    time_per_byte: Duration::from_micros(40),
    bytes: 16 << 20,
    bytes_per_byte: 400,
};

/// The factor by which libFuzzer's counters slow down the same input.
const SLOWER: u32 = if cfg!(feature = "guided") { 4 } else { 1 };

/// A rule of a target that does not hold, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenRule(String);

impl fmt::Display for BrokenRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The cost of one input, and whether it was accepted.
#[derive(Debug, Clone, Copy)]
pub struct InputCost {
    pub accepted: bool,
    pub time: Duration,
    pub bytes: u64,
}

/// The document that lists the parsers. The last column of its table names the targets.
const TABLE: &str = include_str!("../../../docs/fuzzing.md");

impl FuzzTarget {
    fn new(name: &'static str, read: impl Fn(&[u8]) -> bool + Send + 'static, accepted: &[&str]) -> FuzzTarget {
        FuzzTarget {
            name,
            read: Box::new(read),
            accepted: accepted.iter().map(|text| text.as_bytes().to_vec()).collect(),
            refused: Vec::new(),
            limits: LIMITS,
        }
    }

    fn refusing(self, refused: &[&str]) -> FuzzTarget {
        FuzzTarget {
            refused: refused.iter().map(|text| text.as_bytes().to_vec()).collect(),
            ..self
        }
    }

    /// Return the accepted seeds, then the refused ones.
    pub fn seeds(&self) -> impl Iterator<Item = &Vec<u8>> {
        self.accepted.iter().chain(&self.refused)
    }

    /// Read an input within the limits. The error is the rule that it broke.
    pub fn run(&self, input: &[u8]) -> Result<InputCost, BrokenRule> {
        let mut cost = self.measure(input)?;
        // Other programs on the processor can make one run slow. An input that is slow three times is slow.
        for _ in 0..2 {
            if self.limits.check(input.len(), cost).is_ok() {
                break;
            }
            let again = self.measure(input)?;
            cost.time = cost.time.min(again.time);
        }
        self.limits.check(input.len(), cost).map(|()| cost)
    }

    fn measure(&self, input: &[u8]) -> Result<InputCost, BrokenRule> {
        let before = cpu_time();
        let mut outcome = Ok(false);
        let allocated = allocation_counter::measure(|| {
            outcome = catch_unwind(AssertUnwindSafe(|| (self.read)(input))).map_err(|cause| {
                let cause = cause
                    .downcast_ref::<String>()
                    .map(String::as_str)
                    .or_else(|| cause.downcast_ref().copied());
                BrokenRule(cause.unwrap_or("a panic").to_owned())
            });
        });
        Ok(InputCost {
            accepted: outcome?,
            time: cpu_time().saturating_sub(before),
            bytes: allocated.bytes_max,
        })
    }

    /// Check that each seed is accepted or refused as declared. The error names the target, the seed, and the problem.
    pub fn check_seeds(&self) -> Result<(), BrokenRule> {
        let broken = |text: String| Err(BrokenRule(format!("{}: {text}", self.name)));
        let accepted = self.accepted.iter().map(|seed| (seed, true));
        for (number, (seed, expected)) in accepted.chain(self.refused.iter().map(|seed| (seed, false))).enumerate() {
            let shown = String::from_utf8_lossy(&seed[..seed.len().min(200)]);
            match self.run(seed) {
                Ok(cost) if cost.accepted == expected => {}
                Ok(_) if expected => {
                    return broken(format!("seed {number} should be accepted but is refused: {shown}"));
                }
                Ok(_) => {
                    return broken(format!("seed {number} should be refused but is accepted: {shown}"));
                }
                Err(why) => return broken(format!("seed {number} breaks a rule: {why}: {shown}")),
            }
        }
        if self.accepted.is_empty() {
            broken("it has no accepted seed".to_owned())
        } else {
            Ok(())
        }
    }
}

impl CostLimits {
    fn check(self, length: usize, cost: InputCost) -> Result<(), BrokenRule> {
        let length_32 = u32::try_from(length).unwrap_or(u32::MAX);
        let time = SLOWER * self.time.saturating_add(self.time_per_byte.saturating_mul(length_32));
        if cost.time > time {
            return Err(BrokenRule(format!(
                "{length} bytes took {} ms of processor time; at most {} ms are allowed",
                cost.time.as_millis(),
                time.as_millis()
            )));
        }
        let bytes = self.bytes.saturating_add(self.bytes_per_byte.saturating_mul(length as u64));
        if cost.bytes > bytes {
            return Err(BrokenRule(format!(
                "{length} bytes allocated {} KiB at once; at most {} KiB are allowed",
                cost.bytes >> 10,
                bytes >> 10
            )));
        }
        Ok(())
    }
}

pub fn targets() -> Vec<FuzzTarget> {
    let targets = node::targets()
        .into_iter()
        .chain(cluster::targets())
        .chain(extender::targets())
        .chain(pages::targets());
    let targets = targets.chain(container::targets()).chain(host::targets());
    targets.chain(programs::targets()).chain(commands::targets()).collect()
}

/// Check that docs/fuzzing.md names the same targets as this program.
pub fn documented(targets: &[FuzzTarget]) -> Result<(), BrokenRule> {
    let table = TABLE.rsplit("## Targets").next().unwrap_or_default();
    let rows = table.lines().filter(|line| line.starts_with('|')).skip(2);
    let cells = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    let said: BTreeSet<&str> = cells.flat_map(|cell| cell.split(';')).map(str::trim).collect();
    let there: BTreeSet<&str> = targets.iter().map(|target| target.name).collect();
    let differ: Vec<&&str> = said.symmetric_difference(&there).collect();
    if differ.is_empty() {
        Ok(())
    } else {
        Err(BrokenRule(format!("docs/fuzzing.md and the targets differ: {differ:?}")))
    }
}

/// Return the processor time of this thread, without other threads and processes.
pub fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}
