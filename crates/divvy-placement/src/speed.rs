//! How fast a GPU is, for `divvy.dev/gpu-prefer: fastest`: an estimate from what its driver reports.
//!
//! Training and inference are limited by the speed of matrix multiplication or by that of memory. So the estimate multiplies
//! both: dense FP16 operations with FP32 accumulation, times memory bandwidth. This ranks GPUs like the geometric mean of
//! both. It is computed once, when a node is read.
//!
//! - Operations: multiprocessors × clock × operations of one multiprocessor per clock. The last factor is from NVIDIA's
//!   whitepapers for V100 (7.0), Turing (7.5), A100 (8.0), GA102 (8.6), Ada (8.9), H100 (9.0), Blackwell (10.x), and RTX
//!   Blackwell (12.x). For GPUs without tensor cores, FP32 operations count, or FP16 operations where these are twice as fast.
//!   A few products have a lower rate than their generation ([`limited`]).
//! - Memory bandwidth: bus width and memory clock, read by the probe. An older agent, and a driver older than 495, do not report
//!   it. Then it is estimated from the operations by the usual ratio of the generation, so that nodes of both kinds can be
//!   compared.
//!
//! `tests/it/speed.rs` compares the ranking with published figures.

use divvy_model::Gpu;

/// The performance of a generation of GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Generation {
    /// FP16 operations of one multiprocessor per clock.
    per_clock: u64,
    /// Operations per byte of memory bandwidth, for a usual product.
    per_byte: u64,
}

impl Generation {
    const fn new(per_clock: u64, per_byte: u64) -> Generation {
        Generation { per_clock, per_byte }
    }

    /// The values for a generation that is not known here. Newer generations have tensor cores as well.
    const NEWER: Generation = Generation::new(1024, 300);

    fn has_tensor_cores(self) -> bool {
        self.per_clock >= 1024
    }

    /// Return the generation by compute capability.
    fn of(cc: &str, words: &NameWords<'_>) -> Option<Generation> {
        let (major, minor) = cc.split_once('.').unwrap_or((cc, "0"));
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        Some(match (major, minor) {
            (..=2, _) => Generation::new(64, 30),
            (3, _) => Generation::new(384, 30),
            (4..=6, _) => Generation::new(256, 30),
            // TU116 and TU117 have Turing's compute capability but no tensor cores.
            (7, 5) if words.any(&["GTX", "MX450", "MX550", "T400", "T500", "T550", "T600", "T1000", "T1200"]) => {
                Generation::new(256, 30)
            }
            (7, _) => Generation::new(1024, 200),
            (8, 0 | 7) => Generation::new(2048, 200),
            (8, 9) => Generation::new(1024, 300),
            (8, _) => Generation::new(1024, 200),
            (9, _) => Generation::new(4096, 300),
            (10 | 11, _) => Generation::new(8192, 300),
            (12, _) => Generation::new(1024, 300),
            _ => return None,
        })
    }
}

/// The words of a product's name: `NVIDIA`, `A100`, `SXM4`, `40GB`.
struct NameWords<'a>(Vec<&'a str>);

impl<'a> NameWords<'a> {
    fn of(model: &'a str) -> NameWords<'a> {
        NameWords(model.split([' ', '-']).collect())
    }

    fn any(&self, of: &[&str]) -> bool {
        self.0
            .iter()
            .any(|word| of.iter().any(|other| word.eq_ignore_ascii_case(other)))
    }
}

/// Return the divisor for the operations of a product with tensor cores, by its name.
///
/// GeForce cards accumulate in FP32 at half the rate (whitepapers of Turing, GA102, Ada, and RTX Blackwell). By its data sheet,
/// L40 has half of what L40S has, with the same number of multiprocessors. L20 is sold with half the rate of its generation, and
/// H20 with a quarter of H100's.
fn limited(words: &NameWords<'_>) -> u64 {
    match () {
        () if words.any(&["GeForce", "L40", "L20"]) => 2,
        () if words.any(&["H20"]) => 4,
        () => 1,
    }
}

/// Return the clock that a GPU usually reaches, as a fraction (numerator, denominator) of the highest clock that can be set.
///
/// For data center cards, the two are equal. The driver reports 2,100 MHz for an RTX 3090 (data sheet: 1,695) and 3,105 MHz for
/// an RTX 4090 (2,520). It reports the same for laptop GPUs, which reach less.
fn usual_clock(words: &NameWords<'_>) -> (u64, u64) {
    match () {
        () if words.any(&["Laptop", "Mobile", "Q"]) => (2, 3),
        () if words.any(&["GeForce", "RTX", "GTX", "Quadro", "TITAN"]) => (4, 5),
        () => (1, 1),
    }
}

/// Assumed values for a GPU whose driver does not report the number of multiprocessors and the clock.
const USUAL_SMS: u64 = 50;
const USUAL_CLOCK_MHZ: u64 = 1500;

/// Return the estimate: higher is faster, 0 if nothing is known. Numbers larger than those of any real GPU saturate.
pub(crate) fn of(gpu: &Gpu) -> u64 {
    let words = NameWords::of(&gpu.model);
    let generation = Generation::of(&gpu.cc, &words);
    let bandwidth = u64::from(gpu.bandwidth_gbs);
    let known = |value: u32, usual: u64| if value == 0 { usual } else { u64::from(value) };
    // In millions per second.
    let operations = match generation {
        None if gpu.cc.is_empty() && bandwidth == 0 => return 0,
        // As many operations as the memory could feed.
        None if bandwidth > 0 => bandwidth.saturating_mul(Generation::NEWER.per_byte * 1000),
        _ => {
            let (part, whole) = usual_clock(&words);
            let per_clock = generation.unwrap_or(Generation::NEWER).per_clock;
            let clock = known(gpu.clock_mhz, USUAL_CLOCK_MHZ) * part / whole;
            known(gpu.sms, USUAL_SMS).saturating_mul(clock).saturating_mul(per_clock)
        }
    };
    let bandwidth = match bandwidth {
        0 => operations / (generation.unwrap_or(Generation::NEWER).per_byte * 1000),
        read => read,
    };
    let divided = match generation {
        Some(generation) if !generation.has_tensor_cores() => 1,
        _ => limited(&words),
    };
    (operations / divided).saturating_mul(bandwidth)
}
