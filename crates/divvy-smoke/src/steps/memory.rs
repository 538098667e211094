//! S03: patterns in the memory.

use super::{Bench, Done, Outcome, Problem, rate, size};
use crate::expect::PATTERNS;

/// How much of both ends is also compared on the host, so that two kernels that are wrong in the same way are noticed.
const SAMPLE: u64 = 4096;

/// Fill memory with each pattern, and compare it.
pub(crate) fn run(bench: &Bench<'_>) -> Outcome {
    let (driver, bytes) = (bench.driver, bench.sizes.bytes);
    let memory = driver.allocate(bytes)?;
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
                return Err(Problem::wrong(format!(
                    "{name}: the word at byte {} is wrong, which the GPU did not find",
                    word * 4
                )));
            }
        }
    }
    driver.free(results)?;
    driver.free(memory)?;
    let passes = PATTERNS.len();
    let compared = bytes * passes as u64;
    let rate = rate(2.0 * compared as f64, ms, ["GB/s", "TB/s"]);
    Ok(Done::new(
        format!("{} written and compared {passes} times{rate}", size(bytes)),
        compared,
    ))
}
