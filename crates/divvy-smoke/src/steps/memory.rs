//! S03: patterns in the memory.

use super::share::{self, GivenShare, GuardLimit};
use super::{DoneStep, StepBench, StepOutcome, StepProblem, rate, size};
use crate::driver::{CudaCode, GpuAddress};
use crate::expect::PATTERNS;
use crate::sizes::MIB;

/// How much of both ends is also compared on the host, so that two kernels that are wrong in the same way are noticed.
const SAMPLE: u64 = 4096;

/// The most that is left of the free memory when all of it is tested: for the results, and for the driver.
const SPARE: u64 = 64 * MIB;
/// How often less is tried if the driver refuses as much as it calls free. The last try is for three fifths.
const TRIES: u32 = 8;

/// Fill memory with each pattern, and compare it. `all` is the share, if all of its free memory is to be tested.
pub(crate) fn run(bench: &StepBench<'_>, all: Option<(&GivenShare, Option<GuardLimit>)>) -> StepOutcome {
    let driver = bench.driver;
    let (memory, bytes) = match all {
        Some((grant, limit)) => all_free(bench, grant, limit)?,
        None => (driver.allocate(bench.sizes.bytes)?, bench.sizes.bytes),
    };
    let results = driver.allocate(64)?;
    let mut ms = 0.0;
    // No pattern, so that memory that was right before does not help.
    driver.set(memory, 0xA5, bytes)?;
    for pattern in PATTERNS {
        ms += bench.fill(memory, bytes, pattern)?;
        ms += bench.compare(memory, bytes, pattern, results, pattern.name)?;
        let length = SAMPLE.min(bytes);
        for at in [0, bytes - length] {
            // No pattern, so that a download that does nothing is noticed.
            let mut sample = vec![0x3C; length as usize];
            driver.download(&mut sample, memory + at)?;
            if let Some(word) = pattern.first_wrong(&sample, at / 4) {
                let name = pattern.name;
                return Err(StepProblem::wrong(format!(
                    "{name}: the word at byte {} is wrong, which the GPU did not find",
                    word * 4
                )));
            }
        }
    }
    driver.free(results)?;
    driver.free(memory)?;
    let what = if all.is_some() { ", all that was free," } else { "" };
    let passes = PATTERNS.len();
    let compared = bytes * passes as u64;
    let rate = rate(2.0 * compared as f64, ms, ["GB/s", "TB/s"]);
    Ok(DoneStep::new(
        format!("{}{what} written and compared {passes} times{rate}", size(bytes)),
        compared,
    ))
}

/// Allocate the free memory in one piece.
fn all_free(bench: &StepBench<'_>, grant: &GivenShare, limit: Option<GuardLimit>) -> Result<(GpuAddress, u64), StepProblem> {
    let driver = bench.driver;
    let (free, total) = driver.memory()?;
    share::enforceable(total, grant, limit)?;
    let mut bytes = (free - SPARE.min(free / 4)) / MIB * MIB;
    for _ in 1..TRIES {
        match driver.allocate(bytes) {
            Err(failure) if failure.code == CudaCode::OUT_OF_MEMORY => bytes = bytes / 16 * 15 / MIB * MIB,
            allocated => return Ok((allocated?, bytes)),
        }
    }
    Ok((driver.allocate(bytes)?, bytes))
}
