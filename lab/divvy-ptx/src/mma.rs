//! `mma.sync.aligned.m16n8k16` for bf16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type").

/// The lanes of a warp.
pub(crate) const WARP: usize = 32;

/// What a lane has: four registers of a, two of b, four of c.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Fragment {
    pub(crate) a: [u64; 4],
    pub(crate) b: [u64; 2],
    pub(crate) c: [u64; 4],
}

/// Return the two numbers of bf16 in a register. A bf16 is the high half of an f32.
fn pair(register: u64) -> [f32; 2] {
    [(register as u32) << 16, register as u32 & 0xffff_0000].map(f32::from_bits)
}

/// Compute d = a · b + c. Return the four registers of each lane. A GPU does not round after each addition, and adds in an order that is not documented,
/// so only results that are exact are comparable.
pub(crate) fn multiply(lanes: &[Fragment; WARP]) -> [[u64; 4]; WARP] {
    let mut a = [[0.0; 16]; 16];
    let mut b = [[0.0; 8]; 16];
    for (lane, of) in lanes.iter().enumerate() {
        let (group, in_group) = (lane / 4, lane % 4);
        for (index, register) in of.a.iter().enumerate() {
            let row = group + 8 * (index % 2);
            let column = 2 * in_group + 8 * (index / 2);
            a[row][column..column + 2].copy_from_slice(&pair(*register));
        }
        for (index, register) in of.b.iter().enumerate() {
            let row = 2 * in_group + 8 * index;
            [b[row][group], b[row + 1][group]] = pair(*register);
        }
    }
    std::array::from_fn(|lane| {
        let (group, in_group) = (lane / 4, lane % 4);
        std::array::from_fn(|index| {
            let (row, column) = (group + 8 * (index / 2), 2 * in_group + index % 2);
            let sum = f32::from_bits(lanes[lane].c[index] as u32);
            let sum = (0..16).fold(sum, |sum, k| a[row][k].mul_add(b[k][column], sum));
            u64::from(sum.to_bits())
        })
    })
}
