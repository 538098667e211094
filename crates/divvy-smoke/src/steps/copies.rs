//! S06: copies to the GPU, from it, and within it.

use super::{DoneStep, StepBench, StepOutcome, StepProblem, size, tenths};
use crate::codes::StepFinding;
use crate::driver::CallFailure;
use crate::expect::MemoryPattern;
use crate::sizes::MIB;

/// What is copied.
const PATTERN: MemoryPattern = MemoryPattern {
    name: "copies",
    kind: 2,
    seed: 1,
};

/// Smaller copies are too short to say how fast the links are.
const JUDGED: u64 = 64 * MIB;

/// What models of GPUs have: a part of the name, the bandwidth of the memory in GB/s (10^9 bytes, data sheets), and of the PCIe slot in one
/// direction, as pinned copies reach it. The first row whose part is in the name counts.
const MODELS: [(&str, f64, f64); 16] = [
    ("H200", 4800.0, 50.0),
    ("H100 PCIe", 2000.0, 50.0),
    ("H100 NVL", 3900.0, 50.0),
    ("H100", 3350.0, 50.0),
    ("H20", 4000.0, 50.0),
    ("B200", 7700.0, 50.0),
    ("A100-SXM4-80GB", 2039.0, 24.0),
    ("A100 80GB", 1935.0, 24.0),
    ("A100", 1555.0, 24.0),
    ("A30", 933.0, 24.0),
    ("A10", 600.0, 24.0),
    ("L40S", 864.0, 24.0),
    ("L40", 864.0, 24.0),
    ("L4", 300.0, 24.0),
    ("V100", 900.0, 12.0),
    ("T4", 320.0, 12.0),
];

/// The median times of copies in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub to: f64,
    pub from: f64,
    pub within: f64,
}

/// Copy, compare, and measure.
pub(crate) fn run(bench: &StepBench<'_>, model: &str) -> StepOutcome {
    let driver = bench.driver;
    let bytes = bench.sizes.bytes;
    let half = bytes / 2;
    let memory = driver.allocate(bytes)?;
    let results = driver.allocate(64)?;
    let mut host = driver.allocate_pinned(bytes as usize)?;
    PATTERN.write(&mut host, 0);
    let to = median(bench, |_| driver.upload(memory, &host))?;
    bench.compare(memory, bytes, PATTERN, results, "to the GPU")?;
    // The second half holds other words until it becomes a copy of the first.
    let within = median(bench, |stream| driver.copy(memory + half, memory, half, stream))?;
    bench.compare(memory + half, half, PATTERN, results, "within the GPU")?;
    host.fill(0);
    let from = median(bench, |_| driver.download(&mut host, memory))?;
    for (part, at) in host.chunks_exact(half as usize).zip([0, half]) {
        if let Some(word) = PATTERN.first_wrong(part, 0) {
            return Err(StepProblem::wrong(format!(
                "from the GPU: the word at byte {} is wrong",
                at + 4 * word
            )));
        }
    }
    driver.free_pinned(host)?;
    driver.free(results)?;
    driver.free(memory)?;
    let times = Times { to, from, within };
    Ok(DoneStep {
        warning: judge(model, bytes, times),
        ..DoneStep::new(format!("{}: {}", size(bytes), rates(bytes, times)), 2 * bytes + half)
    })
}

fn median(
    bench: &StepBench<'_>,
    mut copy: impl FnMut(crate::driver::DriverHandle) -> Result<(), CallFailure>,
) -> Result<f64, CallFailure> {
    let times: Result<Vec<f64>, CallFailure> = (0..bench.sizes.copies).map(|_| bench.timed(&mut copy)).collect();
    let mut times = times?;
    times.sort_by(f64::total_cmp);
    Ok(times.get(times.len() / 2).copied().unwrap_or(0.0))
}

/// Return GB/s. A clock that does not advance gives infinity.
fn speed(bytes: u64, ms: f64) -> f64 {
    bytes as f64 / (ms * 1e6)
}

/// Return the three speeds: what is copied within the GPU is read and written, half of the bytes each.
fn speeds(bytes: u64, times: Times) -> [(&'static str, f64); 3] {
    [
        ("to the GPU", speed(bytes, times.to)),
        ("from the GPU", speed(bytes, times.from)),
        ("within the GPU", speed(bytes, times.within)),
    ]
}

fn rates(bytes: u64, times: Times) -> String {
    let text = |(name, speed): (&str, f64)| {
        if speed.is_finite() && speed > 0.0 {
            format!("{name} {} GB/s", tenths(speed))
        } else {
            format!("{name} at an unknown speed")
        }
    };
    speeds(bytes, times).map(text).join(", ")
}

/// Return a warning if a link of a known model has less than half of its speed.
pub fn judge(model: &str, bytes: u64, times: Times) -> Option<StepFinding> {
    let (_, memory, slot) = MODELS.iter().find(|(part, ..)| model.contains(part))?;
    if bytes < JUDGED {
        return None;
    }
    let expected = [*slot, *slot, *memory];
    let slow = speeds(bytes, times).into_iter().zip(expected);
    let slow: Vec<String> = slow
        .filter(|((_, speed), expected)| *speed < expected / 2.0)
        .map(|((name, speed), expected)| format!("{name} {} GB/s, expected {}", tenths(speed), tenths(expected)))
        .collect();
    (!slow.is_empty()).then(|| {
        StepFinding::new(
            slow.join("; "),
            "programs that move much data are slow on this GPU",
            "if no other program uses the GPU now, compare nvidia-smi -q -d PERFORMANCE and the PCIe link (lspci -vv, LnkSta) with another node",
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_below_half_of_its_speed_is_a_warning() {
        // 256 MiB in 5.4 ms are 50 GB/s.
        let fast = Times {
            to: 5.4,
            from: 5.4,
            within: 0.1,
        };
        let slow = Times { to: 11.0, ..fast };
        let model = "NVIDIA H100 80GB HBM3";
        assert_eq!(judge(model, 256 * MIB, fast), None);
        let finding = judge(model, 256 * MIB, slow).expect("slow");
        assert_eq!(finding.found, "to the GPU 24 GB/s, expected 50");
        for (model, bytes, times) in [
            (model, 63 * MIB, slow),
            ("Another GPU", 256 * MIB, slow),
            (model, 256 * MIB, Times { to: 0.0, ..fast }),
        ] {
            assert_eq!(judge(model, bytes, times), None);
        }
        assert!(
            rates(
                256 * MIB,
                Times {
                    to: f64::NAN,
                    from: 0.0,
                    within: -1.0
                }
            )
            .matches("unknown speed")
            .count()
                == 3
        );
    }

    #[test]
    fn a_models_own_row_comes_before_that_of_its_family() {
        for (index, (part, ..)) in MODELS.iter().enumerate() {
            let first = MODELS.iter().position(|(other, ..)| part.contains(other));
            assert_eq!(first, Some(index), "{part}");
        }
    }
}
