//! S04: products of matrices.

use super::{DoneStep, StepBench, StepOutcome, StepProblem, rate};
use crate::driver::{Grid, KernelArgument, ModuleText};
use crate::expect::MatrixProduct;

/// The rows of the tiles.
const TILE: u32 = 16;

/// Multiply matrices of f32 and of f64.
pub(crate) fn run(bench: &StepBench<'_>) -> StepOutcome {
    let (n, n64) = (bench.sizes.rows, bench.sizes.rows64);
    let (bytes, ms) = multiply(bench, "matmul_f32", n, &MatrixProduct::of_f32(n), |number| {
        (number as f32).to_le_bytes()
    })?;
    let (bytes64, _) = multiply(bench, "matmul_f64", n64, &MatrixProduct::of_f64(n64), |number| {
        (number as f64).to_le_bytes()
    })?;
    let rate = rate(2.0 * f64::from(n).powi(3), ms, ["GFlop/s", "TFlop/s"]);
    Ok(DoneStep::new(
        format!("{n} x {n} f32 and {n64} x {n64} f64{rate}"),
        bytes + bytes64,
    ))
}

/// Multiply, compare the whole product, and return its bytes and the milliseconds.
fn multiply<const N: usize>(
    bench: &StepBench<'_>,
    kernel: &'static str,
    n: u32,
    product: &MatrixProduct,
    number: fn(u64) -> [u8; N],
) -> Result<(u64, f64), StepProblem> {
    let driver = bench.driver;
    let indices = || (0..u64::from(n)).flat_map(|i| (0..u64::from(n)).map(move |j| (i, j)));
    let a: Vec<u8> = indices().flat_map(|(i, k)| number(product.a(i, k))).collect();
    let b: Vec<u8> = indices().flat_map(|(k, j)| number(product.b(k, j))).collect();
    let bytes = a.len() as u64;
    let function = bench.kernel(ModuleText::Smoke, kernel)?;
    let (on_a, on_b, on_c) = (driver.allocate(bytes)?, driver.allocate(bytes)?, driver.allocate(bytes)?);
    driver.upload(on_a, &a)?;
    driver.upload(on_b, &b)?;
    driver.set(on_c, 0xFF, bytes)?;
    let grid = Grid {
        blocks: (n / TILE, n / TILE),
        threads: (TILE, TILE),
    };
    let arguments = [
        KernelArgument::U64(on_a),
        KernelArgument::U64(on_b),
        KernelArgument::U64(on_c),
        KernelArgument::U32(n),
    ];
    let ms = bench.launch(function, grid, &arguments)?;
    let mut c = vec![0; a.len()];
    driver.download(&mut c, on_c)?;
    for address in [on_a, on_b, on_c] {
        driver.free(address)?;
    }
    let mut elements = indices().zip(c.chunks_exact(N));
    if let Some(((i, j), found)) = elements.find(|((i, j), found)| *found != number(product.c(*i, *j))) {
        let expected = number(product.c(i, j));
        return Err(StepProblem::wrong(format!(
            "{kernel}: element ({i}, {j}) has the bytes {found:02x?}, not {expected:02x?}"
        )));
    }
    Ok((bytes, ms))
}
