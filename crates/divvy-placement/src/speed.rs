//! How fast a GPU is, for `divvy.dev/gpu-prefer: fastest`: an estimate from what its driver says.
//!
//! Training and inference are limited by matrix products or by memory, so the estimate is their product: dense FP16 operations with FP32
//! accumulation, times memory bandwidth. GPUs are ranked by it as by the geometric mean of the two. It is computed once, when a node is read.
//!
//! - Operations: multiprocessors × clock × operations of one multiprocessor per clock. The latter are those of NVIDIA's whitepapers for V100
//!   (7.0), Turing (7.5), A100 (8.0), GA102 (8.6), Ada (8.9), H100 (9.0), Blackwell (10.x) and RTX Blackwell (12.x). Where there are no tensor
//!   cores it is FP32, or FP16 where that is twice as fast. A few products have less than their generation ([`limited`]).
//! - Memory bandwidth: bus width and memory clock, read by the probe. An agent older than that, and a driver older than 495, do not tell it: then it
//!   is what GPUs of the generation usually have for their operations, so that nodes of both kinds can be compared.
//!
//! `tests/it/speed.rs` compares the ranking with published figures.

use divvy_model::Gpu;

/// What a multiprocessor can do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Generation {
    /// FP16 operations per clock.
    per_clock: u64,
    /// Operations for each byte of memory bandwidth, of a usual product.
    per_byte: u64,
}

impl Generation {
    const fn new(per_clock: u64, per_byte: u64) -> Generation {
        Generation { per_clock, per_byte }
    }

    /// Of a generation that is not known here: newer ones have tensor cores, too.
    const NEWER: Generation = Generation::new(1024, 300);

    fn has_tensor_cores(self) -> bool {
        self.per_clock >= 1024
    }

    /// By compute capability.
    fn of(cc: &str, words: &Words<'_>) -> Option<Generation> {
        let (major, minor) = cc.split_once('.').unwrap_or((cc, "0"));
        let (major, minor): (u32, u32) = (major.parse().ok()?, minor.parse().ok()?);
        Some(match (major, minor) {
            (..=2, _) => Generation::new(64, 30),
            (3, _) => Generation::new(384, 30),
            (4..=6, _) => Generation::new(256, 30),
            // TU116 and TU117 have Turing's compute capability and no tensor cores.
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
struct Words<'a>(Vec<&'a str>);

impl<'a> Words<'a> {
    fn of(model: &'a str) -> Words<'a> {
        Words(model.split([' ', '-']).collect())
    }

    fn any(&self, of: &[&str]) -> bool {
        self.0
            .iter()
            .any(|word| of.iter().any(|other| word.eq_ignore_ascii_case(other)))
    }
}

/// By what the operations of a product with tensor cores are divided, by its name.
///
/// Those of GeForce cards accumulate in FP32 at half the rate (whitepapers of Turing, GA102, Ada and RTX Blackwell). L40 has by its data sheet half of
/// what L40S has with as many multiprocessors. L20 and H20 are sold with half of that rate, and a quarter of H100's.
fn limited(words: &Words<'_>) -> u64 {
    match () {
        () if words.any(&["GeForce", "L40", "L20"]) => 2,
        () if words.any(&["H20"]) => 4,
        () => 1,
    }
}

/// The clock that a GPU usually reaches, of the highest that it can be set to, as a fraction.
///
/// Of cards for data centres the two are one. The driver says 2,100 MHz of an RTX 3090 (data sheet: 1,695), 3,105 of an RTX 4090 (2,520); and the
/// same of laptops, which reach less.
fn usual_clock(words: &Words<'_>) -> (u64, u64) {
    match () {
        () if words.any(&["Laptop", "Mobile", "Q"]) => (2, 3),
        () if words.any(&["GeForce", "RTX", "GTX", "Quadro", "TITAN"]) => (4, 5),
        () => (1, 1),
    }
}

/// Where the driver does not say how many multiprocessors there are, and at which clock.
const USUAL_SMS: u64 = 50;
const USUAL_CLOCK_MHZ: u64 = 1500;

/// The higher, the faster; 0 if nothing is known. Numbers that no GPU has saturate.
pub(crate) fn of(gpu: &Gpu) -> u64 {
    let words = Words::of(&gpu.model);
    let generation = Generation::of(&gpu.cc, &words);
    let bandwidth = u64::from(gpu.bandwidth_gbs);
    let known = |value: u32, usual: u64| if value == 0 { usual } else { u64::from(value) };
    // In millions per second.
    let operations = match generation {
        None if gpu.cc.is_empty() && bandwidth == 0 => return 0,
        // What memory could feed.
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
