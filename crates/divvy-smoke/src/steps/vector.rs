//! S02: the vector addition of CUDA's sample vectorAdd, with results that are compared bit by bit.

use super::{DoneStep, StepBench, StepOutcome, StepProblem};
use crate::driver::{Grid, KernelArgument, ModuleText};
use crate::expect;

/// What the sample would say, for the command `vector-add`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SampleNote {
    /// A line of its output.
    Line(String),
    /// What it does next, as it says it when that fails: "Failed to …".
    Doing(&'static str),
}

/// The lines that the sample prints after its results were compared.
pub const PASSED: [&str; 2] = ["Test PASSED", "Done"];

/// Add two vectors.
pub(crate) fn run(bench: &StepBench<'_>, note: &mut dyn FnMut(SampleNote)) -> StepOutcome {
    let driver = bench.driver;
    let elements = bench.sizes.elements;
    let mut line = |text: String| note(SampleNote::Line(text));
    line(format!("[Vector addition of {elements} elements]"));
    let values = |index: usize| -> Vec<u8> { (0..elements).flat_map(|i| expect::vector(i)[index].to_le_bytes()).collect() };
    let (a, b, expected) = (values(0), values(1), values(2));
    let bytes = expected.len() as u64;

    note(SampleNote::Doing("load the kernel"));
    let kernel = bench.kernel(ModuleText::Smoke, "vector_add")?;
    note(SampleNote::Doing("allocate device vector A"));
    let on_a = driver.allocate(bytes)?;
    note(SampleNote::Doing("allocate device vector B"));
    let on_b = driver.allocate(bytes)?;
    note(SampleNote::Doing("allocate device vector C"));
    let on_c = driver.allocate(bytes)?;
    note(SampleNote::Line(
        "Copy input data from the host memory to the CUDA device".to_owned(),
    ));
    note(SampleNote::Doing("copy vector A from host to device"));
    driver.upload(on_a, &a)?;
    note(SampleNote::Doing("copy vector B from host to device"));
    driver.upload(on_b, &b)?;
    // Not a sum of the vectors, so that what is not written is wrong.
    note(SampleNote::Doing("set vector C"));
    driver.set(on_c, 0xFF, bytes)?;
    let grid = Grid {
        blocks: (elements.div_ceil(256), 1),
        threads: (256, 1),
    };
    note(SampleNote::Line(format!(
        "CUDA kernel launch with {} blocks of 256 threads",
        grid.blocks.0
    )));
    note(SampleNote::Doing("launch vectorAdd kernel"));
    let arguments = [
        KernelArgument::U64(on_a),
        KernelArgument::U64(on_b),
        KernelArgument::U64(on_c),
        KernelArgument::U32(elements),
    ];
    bench.launch(kernel, grid, &arguments)?;
    note(SampleNote::Line(
        "Copy output data from the CUDA device to the host memory".to_owned(),
    ));
    note(SampleNote::Doing("copy vector C from device to host"));
    let mut c = vec![0; expected.len()];
    driver.download(&mut c, on_c)?;
    note(SampleNote::Doing("free device vectors"));
    for address in [on_a, on_b, on_c] {
        driver.free(address)?;
    }
    let pairs = c.chunks_exact(4).zip(expected.chunks_exact(4));
    if let Some(element) = pairs.into_iter().position(|(found, expected)| found != expected) {
        return Err(StepProblem::wrong(format!(
            "Result verification failed at element {element}!"
        )));
    }
    Ok(DoneStep::new(format!("{elements} sums compared"), bytes))
}
