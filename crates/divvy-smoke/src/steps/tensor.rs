//! S05: the tensor cores.

use super::{DoneStep, StepBench, StepOutcome, StepProblem, rate};
use crate::driver::{Grid, KernelArgument, ModuleText};
use crate::expect::{bf16, tensor_a, tensor_b, tensor_c};

/// The bytes of a block's result: 16 x 8 numbers of f32.
const RESULT: u64 = 512;
/// The additions and multiplications of one instruction.
const OPERATIONS: f64 = (2 * 16 * 8 * 16) as f64;

/// Multiply matrices of bf16 on each multiprocessor.
pub(crate) fn run(bench: &StepBench<'_>) -> StepOutcome {
    let (driver, loops) = (bench.driver, bench.sizes.loops);
    let blocks = bench.multiprocessors.max(1) * bench.sizes.warps;
    // a by rows, b by columns.
    let a: Vec<u8> = (0..16)
        .flat_map(|i| (0..16).flat_map(move |k| bf16(tensor_a(i, k)).to_le_bytes()))
        .collect();
    let b: Vec<u8> = (0..8)
        .flat_map(|j| (0..16).flat_map(move |k| bf16(tensor_b(k, j)).to_le_bytes()))
        .collect();
    let one: Vec<u8> = (0..16)
        .flat_map(|i| (0..8).flat_map(move |j| ((loops * tensor_c(i, j)) as f32).to_le_bytes()))
        .collect();
    let kernel = bench.kernel(ModuleText::Tensor, "tensor")?;
    let bytes = u64::from(blocks) * RESULT;
    let (on_a, on_b, on_c) = (
        driver.allocate(a.len() as u64)?,
        driver.allocate(b.len() as u64)?,
        driver.allocate(bytes)?,
    );
    driver.upload(on_a, &a)?;
    driver.upload(on_b, &b)?;
    driver.set(on_c, 0xFF, bytes)?;
    let grid = Grid {
        blocks: (blocks, 1),
        threads: (32, 1),
    };
    let arguments = [
        KernelArgument::U64(on_a),
        KernelArgument::U64(on_b),
        KernelArgument::U64(on_c),
        KernelArgument::U32(loops),
    ];
    let ms = bench.launch(kernel, grid, &arguments)?;
    let mut c = vec![0; bytes as usize];
    driver.download(&mut c, on_c)?;
    for address in [on_a, on_b, on_c] {
        driver.free(address)?;
    }
    if let Some(block) = c.chunks_exact(RESULT as usize).position(|result| result != one) {
        return Err(StepProblem::wrong(format!(
            "the product of block {block} of {blocks} is wrong"
        )));
    }
    let rate = rate(OPERATIONS * f64::from(loops) * f64::from(blocks), ms, ["GFlop/s", "TFlop/s"]);
    Ok(DoneStep::new(
        format!("bf16, {blocks} warps, {loops} products each{rate}"),
        bytes,
    ))
}
