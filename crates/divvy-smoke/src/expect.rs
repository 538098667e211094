//! What the GPU must compute. All numbers are integers that the floating-point types hold exactly, so results are compared bit by bit.

/// The values with which memory is filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MemoryPattern {
    pub(crate) name: &'static str,
    /// The kernel's argument `kind`.
    pub(crate) kind: u32,
    pub(crate) seed: u32,
}

/// The passes over the memory. Each bit is 0 in one pass and 1 in another, and each word differs from the others in two.
pub(crate) const PATTERNS: [MemoryPattern; 4] = [
    MemoryPattern {
        name: "zeros",
        kind: 0,
        seed: 0,
    },
    MemoryPattern {
        name: "ones",
        kind: 0,
        seed: u32::MAX,
    },
    MemoryPattern {
        name: "addresses",
        kind: 1,
        seed: 0x5A5A_5A5A,
    },
    MemoryPattern {
        name: "xorshift",
        kind: 2,
        seed: 0x9E37_79B9,
    },
];

impl MemoryPattern {
    /// Return word `index`, as the kernels `fill` and `check` compute it.
    pub(crate) fn word(self, index: u64) -> u32 {
        let low = index as u32;
        match self.kind {
            0 => self.seed,
            1 => low ^ (index >> 32) as u32 ^ self.seed,
            _ => match low.wrapping_add(self.seed) {
                0 => xorshift(0x9E37_79B9),
                seed => xorshift(seed),
            },
        }
    }

    /// Write the words from `index` on.
    pub(crate) fn write(self, to: &mut [u8], index: u64) {
        for (place, index) in to.chunks_exact_mut(4).zip(index..) {
            place.copy_from_slice(&self.word(index).to_le_bytes());
        }
    }

    /// Return the index of the first word that is not what it must be. `index` is that of the first word.
    pub(crate) fn first_wrong(self, bytes: &[u8], index: u64) -> Option<u64> {
        let mut words = bytes.chunks_exact(4).zip(index..);
        words.find_map(|(word, index)| (word != self.word(index).to_le_bytes()).then_some(index))
    }
}

fn xorshift(mut x: u32) -> u32 {
    x ^= x << 13;
    x ^= x >> 17;
    x ^= x << 5;
    x
}

/// Return element `i` of the vectors a and b, and of their sum. All are less than 2^24.
pub(crate) fn vector(i: u32) -> [f32; 3] {
    let a = i % 65_521;
    let b = 3 * (i % 9973) + 1;
    [a as f32, b as f32, (a + b) as f32]
}

/// Two matrices whose product has a closed form: a(i, k) = row(i) + inner_a(k), b(k, j) = column(j) + inner_b(k).
#[derive(Debug, Clone, Copy)]
pub(crate) struct MatrixProduct {
    rows: u64,
    /// The factors by which the numbers are larger than the smallest ones.
    scale: u64,
    sum_a: u64,
    sum_b: u64,
    sum_ab: u64,
}

impl MatrixProduct {
    /// The product for f32: no sum exceeds 2^24, in whatever order it is made.
    pub(crate) fn of_f32(rows: u32) -> MatrixProduct {
        MatrixProduct::new(rows, 1)
    }

    /// The product for f64: the sums exceed 2^24, so that f32 would not hold them, and stay below 2^53.
    pub(crate) fn of_f64(rows: u32) -> MatrixProduct {
        MatrixProduct::new(rows, 100_003)
    }

    fn new(rows: u32, scale: u64) -> MatrixProduct {
        let rows = u64::from(rows);
        let sum = |of: &dyn Fn(u64) -> u64| (0..rows).map(of).sum::<u64>();
        MatrixProduct {
            rows,
            scale,
            sum_a: sum(&inner_a),
            sum_b: sum(&inner_b),
            sum_ab: sum(&|k| inner_a(k) * inner_b(k)),
        }
    }

    pub(crate) fn a(&self, i: u64, k: u64) -> u64 {
        self.scale * (i % 7 + inner_a(k))
    }

    pub(crate) fn b(&self, k: u64, j: u64) -> u64 {
        self.scale * (j % 11 + inner_b(k))
    }

    /// Return the element of the product: the sum over k of a(i, k) * b(k, j), multiplied out.
    pub(crate) fn c(&self, i: u64, j: u64) -> u64 {
        let (row, column) = (i % 7, j % 11);
        self.scale * self.scale * (self.rows * row * column + row * self.sum_b + column * self.sum_a + self.sum_ab)
    }
}

fn inner_a(k: u64) -> u64 {
    k % 5
}

fn inner_b(k: u64) -> u64 {
    k % 3
}

/// Return the numbers of the matrices for tensor cores: a has 16 rows and 16 columns, b 16 rows and 8 columns.
pub(crate) fn tensor_a(i: u32, k: u32) -> u32 {
    (i + 2 * k) % 4
}

/// The other factor.
pub(crate) fn tensor_b(k: u32, j: u32) -> u32 {
    (3 * k + j) % 5
}

/// Return an element of the product. It is at most 192.
pub(crate) fn tensor_c(i: u32, j: u32) -> u32 {
    (0..16).map(|k| tensor_a(i, k) * tensor_b(k, j)).sum()
}

/// Return a small integer as a bf16: the upper half of its f32.
pub(crate) fn bf16(number: u32) -> u16 {
    ((number as f32).to_bits() >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_closed_form_is_the_sum_and_every_number_is_exact() {
        for (product, limit) in [
            (MatrixProduct::of_f32(1024), 1_u64 << 24),
            (MatrixProduct::of_f32(48), 1 << 24),
            (MatrixProduct::of_f64(64), 1 << 53),
        ] {
            for (i, j) in [(0, 0), (1, 0), (0, 1), (6, 10), (5, 9), (product.rows - 1, product.rows - 1)] {
                let sum: u64 = (0..product.rows).map(|k| product.a(i, k) * product.b(k, j)).sum();
                assert_eq!(product.c(i, j), sum, "{i} {j}");
                assert!(sum < limit);
            }
        }
        assert!(MatrixProduct::of_f64(64).c(6, 10) > 1 << 24, "f32 must not be enough");
    }

    #[test]
    fn a_transposed_product_is_another_one() {
        let product = MatrixProduct::of_f32(32);
        let transposed = (0..32).flat_map(|i| (0..32).map(move |j| (i, j)));
        assert!(transposed.filter(|(i, j)| product.c(*i, *j) != product.c(*j, *i)).count() > 500);
    }

    #[test]
    fn sums_of_vectors_and_products_of_tensors_are_exact() {
        for i in 0..50_000 {
            let [a, b, sum] = vector(i);
            assert!(sum < 16_777_216.0 && a + b == sum);
        }
        let largest = (0..16).flat_map(|i| (0..8).map(move |j| tensor_c(i, j))).max();
        assert!(largest.is_some_and(|sum| sum * 4096 < 1 << 24));
        for number in 0..5 {
            assert_eq!(f32::from_bits(u32::from(bf16(number)) << 16), number as f32);
        }
    }

    #[test]
    fn a_pattern_finds_each_changed_word() {
        for pattern in PATTERNS {
            let mut bytes = vec![0; 64];
            pattern.write(&mut bytes, 1000);
            assert_eq!(pattern.first_wrong(&bytes, 1000), None);
            bytes[37] ^= 0x10;
            assert_eq!(pattern.first_wrong(&bytes, 1000), Some(1009), "{}", pattern.name);
        }
        // 1_640_531_527 + 0x9E3779B9 wraps to 0.
        assert_eq!(PATTERNS[3].word(1_640_531_527), xorshift(0x9E37_79B9));
    }
}
