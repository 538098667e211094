//! The steps, each a function of a driver and of values. None of them prints.

pub mod accounting;
pub mod copies;
pub mod matrix;
pub mod memory;
pub mod open;
pub mod share;
pub mod tensor;
pub mod vector;

use std::cell::RefCell;

use crate::codes::StepFinding;
use crate::driver::{CallFailure, Driver, DriverHandle, GpuAddress, Grid, KernelArgument, ModuleText};
use crate::expect::MemoryPattern;
use crate::sizes::Sizes;

/// A step that was done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DoneStep {
    pub found: String,
    /// How many bytes of results were compared.
    pub bytes: u64,
    /// What is not as it should be, although the results are right.
    pub warning: Option<StepFinding>,
}

impl DoneStep {
    pub fn new(found: impl Into<String>, bytes: u64) -> DoneStep {
        DoneStep {
            found: found.into(),
            bytes,
            warning: None,
        }
    }
}

/// A step that did not pass.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepProblem {
    /// A call failed.
    Failed(CallFailure),
    /// A result is wrong.
    Finding(StepFinding),
    /// The step does not apply, for this reason.
    Skip(String),
}

impl From<CallFailure> for StepProblem {
    fn from(failure: CallFailure) -> StepProblem {
        StepProblem::Failed(failure)
    }
}

impl StepProblem {
    pub fn finding(found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> StepProblem {
        StepProblem::Finding(StepFinding::new(found, why, fix))
    }

    /// A wrong result.
    pub fn wrong(found: impl Into<String>) -> StepProblem {
        StepProblem::Finding(StepFinding::of_gpu(
            found,
            "programs on this GPU compute wrong results",
            "look for an XID and ECC errors on the node (dmesg | grep NVRM; nvidia-smi -q -d ECC), and drain the GPU if it happens again",
        ))
    }
}

pub type StepOutcome = Result<DoneStep, StepProblem>;

/// The number of threads in a block of a kernel that goes over memory.
const THREADS: u32 = 256;

/// A GPU on which steps run.
pub(crate) struct StepBench<'d> {
    pub driver: &'d dyn Driver,
    pub device: i32,
    pub sizes: Sizes,
    /// The number of multiprocessors.
    pub multiprocessors: u32,
    stream: DriverHandle,
    start: DriverHandle,
    end: DriverHandle,
    modules: RefCell<Vec<(ModuleText, DriverHandle)>>,
}

impl<'d> StepBench<'d> {
    /// Prepare the current context.
    pub(crate) fn new(
        driver: &'d dyn Driver,
        device: i32,
        sizes: Sizes,
        multiprocessors: u32,
    ) -> Result<StepBench<'d>, CallFailure> {
        Ok(StepBench {
            driver,
            device,
            sizes,
            multiprocessors,
            stream: driver.stream()?,
            start: driver.event()?,
            end: driver.event()?,
            modules: RefCell::default(),
        })
    }

    /// Give back what the run took. The driver does the same when the process ends; here it can say that it fails.
    pub(crate) fn close(&self) -> Result<(), CallFailure> {
        self.driver.synchronize()?;
        for (_, module) in self.modules.borrow_mut().drain(..) {
            self.driver.unload(module)?;
        }
        self.driver.release(self.device)
    }

    /// Return a kernel. Its text is compiled at the first use.
    fn kernel(&self, text: ModuleText, name: &'static str) -> Result<DriverHandle, CallFailure> {
        let known = self
            .modules
            .borrow()
            .iter()
            .find(|(known, _)| *known == text)
            .map(|(_, module)| *module);
        let module = match known {
            Some(module) => module,
            None => {
                let module = self.driver.load(text)?;
                self.modules.borrow_mut().push((text, module));
                module
            }
        };
        self.driver.function(module, name)
    }

    /// Do something in the stream, wait for it, and return how many milliseconds the GPU says it took.
    fn timed(&self, work: impl FnOnce(DriverHandle) -> Result<(), CallFailure>) -> Result<f64, CallFailure> {
        self.driver.record(self.start, self.stream)?;
        work(self.stream)?;
        self.driver.record(self.end, self.stream)?;
        self.driver.wait(self.stream)?;
        Ok(f64::from(self.driver.elapsed(self.start, self.end)?))
    }

    fn launch(&self, kernel: DriverHandle, grid: Grid, arguments: &[KernelArgument]) -> Result<f64, CallFailure> {
        self.timed(|stream| self.driver.launch(kernel, grid, arguments, stream))
    }

    /// Return a grid whose threads go over memory of this size.
    fn over(&self, bytes: u64) -> Grid {
        let needed = (bytes / 16).div_ceil(u64::from(THREADS)).max(1);
        let most = u64::from(self.multiprocessors.max(1)) * 8;
        Grid {
            blocks: (u32::try_from(needed.min(most)).unwrap_or(1), 1),
            threads: (THREADS, 1),
        }
    }

    /// Fill memory with a pattern.
    fn fill(&self, to: GpuAddress, bytes: u64, pattern: MemoryPattern) -> Result<f64, CallFailure> {
        let kernel = self.kernel(ModuleText::Smoke, "fill")?;
        let arguments = [
            KernelArgument::U64(to),
            KernelArgument::U64(bytes / 4),
            KernelArgument::U32(pattern.kind),
            KernelArgument::U32(pattern.seed),
        ];
        self.launch(kernel, self.over(bytes), &arguments)
    }

    /// Compare memory with a pattern on the GPU. `what` names it in a finding.
    fn compare(
        &self,
        from: GpuAddress,
        bytes: u64,
        pattern: MemoryPattern,
        results: GpuAddress,
        what: &str,
    ) -> Result<f64, StepProblem> {
        let kernel = self.kernel(ModuleText::Smoke, "check")?;
        let words = bytes / 4;
        self.driver.upload(results, &numbers([0, u64::MAX, 0]))?;
        let arguments = [
            KernelArgument::U64(from),
            KernelArgument::U64(words),
            KernelArgument::U32(pattern.kind),
            KernelArgument::U32(pattern.seed),
            KernelArgument::U64(results),
        ];
        let time = self.launch(kernel, self.over(bytes), &arguments)?;
        let mut read = [0xFF; 24];
        self.driver.download(&mut read, results)?;
        let number = |index: usize| {
            read[8 * index..]
                .first_chunk()
                .map_or(u64::MAX, |bytes| u64::from_le_bytes(*bytes))
        };
        judge(number(0), number(1), number(2), words, what)?;
        Ok(time)
    }
}

/// Judge what the kernel `check` counted. It must have looked at every word, and its two statements must agree.
pub fn judge(wrong: u64, first: u64, compared: u64, words: u64, what: &str) -> Result<(), StepProblem> {
    if compared != words {
        return Err(StepProblem::wrong(format!(
            "{what}: the GPU compared {compared} of {words} words"
        )));
    }
    match (wrong, first) {
        (0, u64::MAX) => Ok(()),
        (0, first) => Err(StepProblem::wrong(format!("{what}: no word is wrong, and word {first} is"))),
        (wrong, first) => {
            let verb = if wrong == 1 { "is" } else { "are" };
            let first = first.saturating_mul(4);
            Err(StepProblem::wrong(format!(
                "{what}: {wrong} of {words} words {verb} wrong, the first at byte {first}"
            )))
        }
    }
}

/// Return numbers as bytes.
fn numbers<const N: usize>(numbers: [u64; N]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
}

/// Return a rate with its unit, or nothing if the clock says nothing.
pub fn rate(amount: f64, ms: f64, units: [&str; 2]) -> String {
    let rate = amount / (ms * 1e6);
    match rate {
        rate if !(ms > 0.0 && rate.is_finite()) => String::new(),
        rate if rate >= 1000.0 => format!(", {} {}", tenths(rate / 1000.0), units[1]),
        rate => format!(", {} {}", tenths(rate), units[0]),
    }
}

/// Return a number as text: with one digit after the point if it is small. The standard library's code for floating-point numbers would be a large part
/// of the program.
pub fn tenths(number: f64) -> String {
    let tenths = (number * 10.0).round() as u64;
    match tenths {
        0..100 => format!("{}.{}", tenths / 10, tenths % 10),
        _ => format!("{}", (tenths + 5) / 10),
    }
}

/// Return a number of bytes as text.
pub fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes if bytes >= 1 << 10 => format!("{} KiB", bytes >> 10),
        bytes => format!("{bytes} bytes"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every word must have been compared.
    #[test]
    fn only_comparisons_with_all_words_right_pass() {
        const NONE: u64 = u64::MAX;
        assert_eq!(judge(0, NONE, 64, 64, "x"), Ok(()));
        for (wrong, first, compared, part) in [
            (0, NONE, 63, "x: the GPU compared 63 of 64 words"),
            (0, NONE, 0, "compared 0 of 64"),
            (0, NONE, 65, "compared 65 of 64"),
            (1, 7, 64, "1 of 64 words is wrong, the first at byte 28"),
            (64, 0, 64, "64 of 64 words are wrong, the first at byte 0"),
            (0, 3, 64, "no word is wrong, and word 3 is"),
            (NONE, NONE, NONE, "the GPU compared"),
            (2, NONE, 64, "2 of 64"),
        ] {
            match judge(wrong, first, compared, 64, "x") {
                Err(StepProblem::Finding(finding)) => assert!(finding.found.contains(part), "{}", finding.found),
                other => panic!("{part}: {other:?}"),
            }
        }
    }

    #[test]
    fn a_clock_that_says_nothing_gives_no_rate() {
        let units = ["GB/s", "TB/s"];
        let table = [
            (0.0, ""),
            (-1.0, ""),
            (f64::NAN, ""),
            (f64::INFINITY, ", 0.0 GB/s"),
            (1.0, ", 3.0 TB/s"),
            (100.0, ", 30 GB/s"),
            (1e4, ", 0.3 GB/s"),
        ];
        for (ms, expected) in table {
            assert_eq!(rate(3e9, ms, units), expected, "{ms}");
        }
    }
}
