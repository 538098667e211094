//! The kernels of `divvy smoke` against the same calculation in Rust.

use divvy_ptx::{KernelLaunch, ThreadOrder};
use proptest::prelude::*;

use crate::memory::{SMOKE, TENSOR, U32, U64, Window, launch, module, run};

const AT: u64 = 0x3_0200_0000;

/// The word with this index that `fill` writes.
pub(crate) fn word(index: u64, kind: u32, seed: u32) -> u32 {
    match kind {
        0 => seed,
        1 => index as u32 ^ (index >> 32) as u32 ^ seed,
        _ => {
            let mut x = (index as u32).wrapping_add(seed);
            if x == 0 {
                x = 0x9e37_79b9;
            }
            x ^= x << 13;
            x ^= x >> 17;
            x ^ (x << 5)
        }
    }
}

fn bytes_of<T: Copy, const N: usize>(values: &[T], bytes: impl Fn(T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(|value| bytes(*value)).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn vectors_are_added(count in 1..1500u32, seed: u32) {
        let (a, b): (Vec<f32>, Vec<f32>) = (0..count).map(|i| ((i ^ seed & 0xffff) as f32, (3 * i) as f32)).unzip();
        let size = 4 * u64::from(count);
        let mut memory = Window::new(AT, 3 * size as usize + 64);
        memory.put(AT, &bytes_of(&a, f32::to_le_bytes));
        memory.put(AT + size, &bytes_of(&b, f32::to_le_bytes));
        let arguments = [U64(AT), U64(AT + size), U64(AT + 2 * size), U32(count)];
        run(&module(SMOKE), "vector_add", [count.div_ceil(256), 1], [256, 1], &arguments, &mut memory).expect("it runs");
        let sums: Vec<u32> = a.iter().zip(&b).map(|(a, b)| (a + b).to_bits()).collect();
        prop_assert_eq!(memory.words(AT + 2 * size, count as usize), sums);
        prop_assert!(memory.untouched_but(AT, 3 * size as usize));
    }

    #[test]
    fn memory_is_filled_and_checked(
        fours in 1..700u64, kind in 0..3u32, seed in prop_oneof![any::<u32>(), (0..3000u32).prop_map(u32::wrapping_neg)],
        blocks in 1..5u32, threads in 1..65u32, wrong in prop::collection::vec((any::<prop::sample::Index>(), 1..u32::MAX), 0..5),
    ) {
        let module = module(SMOKE);
        let words = 4 * fours;
        let result = AT + 64 + 4 * words;
        let mut memory = Window::new(AT, 128 + 4 * words as usize);
        let to = AT + 32;
        let grid = ([blocks, 1], [threads, 1]);
        run(&module, "fill", grid.0, grid.1, &[U64(to), U64(words), U32(kind), U32(seed)], &mut memory).expect("it runs");
        let mut expected: Vec<u32> = (0..words).map(|index| word(index, kind, seed)).collect();
        prop_assert_eq!(&memory.words(to, words as usize), &expected);
        prop_assert!(memory.untouched_but(to, 4 * words as usize));
        // Each XOR changes a word, so two of the same word may undo each other.
        for (at, change) in &wrong {
            let at = at.index(words as usize);
            expected[at] ^= change;
            memory.put(to + 4 * at as u64, &expected[at].to_le_bytes());
        }
        let is_wrong = |index: &u64| expected[*index as usize] != word(*index, kind, seed);
        let first = (0..words).find(is_wrong).unwrap_or(u64::MAX);
        let count = (0..words).filter(is_wrong).count() as u64;
        memory.put(result, &bytes_of(&[0, u64::MAX, 0], u64::to_le_bytes));
        let arguments = [U64(to), U64(words), U32(kind), U32(seed), U64(result)];
        run(&module, "check", grid.0, grid.1, &arguments, &mut memory).expect("it runs");
        prop_assert_eq!(memory.get(result, 24), bytes_of(&[count, first, words], u64::to_le_bytes));
    }

    #[test]
    fn matrices_are_multiplied(tiles in 1..4u32, seed: u32) {
        let n = 16 * tiles;
        let count = (n * n) as usize;
        let module = module(SMOKE);
        let number = |index: usize, salt: u32| (index as u32).wrapping_mul(2_654_435_761).wrapping_add(seed ^ salt) >> 24;
        let a: Vec<u32> = (0..count).map(|index| number(index, 1)).collect();
        let b: Vec<u32> = (0..count).map(|index| number(index, 2)).collect();
        let n_ = n as usize;
        let product = |index: usize| (0..n_).map(|k| a[index / n_ * n_ + k] * b[k * n_ + index % n_]).sum::<u32>();
        for (name, size) in [("matmul_f32", 4), ("matmul_f64", 8)] {
            let encode = |values: &[u32]| match size {
                4 => bytes_of(values, |value| (value as f32).to_le_bytes()),
                _ => bytes_of(values, |value| f64::from(value).to_le_bytes()),
            };
            let length = size * count;
            let mut memory = Window::new(AT, 3 * length);
            memory.put(AT, &encode(&a));
            memory.put(AT + length as u64, &encode(&b));
            let arguments = [U64(AT), U64(AT + length as u64), U64(AT + 2 * length as u64), U32(n)];
            run(&module, name, [tiles, tiles], [16, 16], &arguments, &mut memory).expect("it runs");
            let products: Vec<u32> = (0..count).map(product).collect();
            prop_assert_eq!(memory.get(AT + 2 * length as u64, length), encode(&products), "{}", name);
        }
    }

    #[test]
    fn tensor_cores_multiply(loops in 0..5u32, blocks in 1..4u32, numbers in prop::collection::vec(0..16u16, 16 * 16 + 16 * 8)) {
        let (a, b) = numbers.split_at(256);
        let bf16 = |value: u16| ((f32::from(value).to_bits() >> 16) as u16).to_le_bytes();
        let (at_b, at_c) = (AT + 512, AT + 768);
        let mut memory = Window::new(AT, 768 + 512 * blocks as usize + 16);
        memory.put(AT, &bytes_of(a, bf16));
        memory.put(at_b, &bytes_of(b, bf16));
        let arguments = [U64(AT), U64(at_b), U64(at_c), U32(loops)];
        run(&module(TENSOR), "tensor", [blocks, 1], [32, 1], &arguments, &mut memory).expect("it runs");
        let element = |index: usize| {
            let sum: u32 = (0..16).map(|k| u32::from(a[index / 8 * 16 + k]) * u32::from(b[index % 8 * 16 + k])).sum();
            ((sum * loops) as f32).to_bits()
        };
        let block: Vec<u32> = (0..128).map(element).collect();
        prop_assert_eq!(memory.words(at_c, 128 * blocks as usize), block.repeat(blocks as usize));
        prop_assert!(memory.untouched_but(AT, 768 + 512 * blocks as usize));
    }
}

/// Words behind the first 16 GiB, whose index has more than 32 bits.
#[test]
fn words_with_a_long_index_are_filled_and_checked() {
    let module = module(SMOKE);
    let (threads, first) = (64, 1 << 32);
    let words = first + 4 * u64::from(threads);
    let result = AT + 4 * words;
    for kind in 0..3 {
        let mut memory = Window::new(AT + 4 * first, 4 * 4 * threads as usize + 24);
        let mut only = |name, arguments: &[_]| {
            let kernel = module.kernel(name).expect("it");
            let block = [(first / 4 / u64::from(threads)) as u32, 0, 0];
            let launched = KernelLaunch {
                only: Some(block),
                ..launch(kernel, [block[0] + 1, 1], [threads, 1], arguments, ThreadOrder::Forward)
            };
            kernel.run(&launched, &mut memory).expect("it runs");
            memory.words(AT + 4 * first, 4 * threads as usize + 6)
        };
        let filled = only("fill", &[U64(AT), U64(words), U32(kind), U32(7)]);
        let expected: Vec<u32> = (first..words).map(|index| word(index, kind, 7)).collect();
        assert_eq!(filled[..expected.len()], expected, "{kind}");
        memory.put(result, &bytes_of(&[0, u64::MAX, 0], u64::to_le_bytes));
        memory.put(AT + 4 * first + 40, &[1, 2, 3, 4]);
        let kernel = module.kernel("check").expect("it");
        let block = [(first / 4 / u64::from(threads)) as u32, 0, 0];
        let arguments = [U64(AT), U64(words), U32(kind), U32(7), U64(result)];
        let launched = KernelLaunch {
            only: Some(block),
            ..launch(kernel, [block[0] + 1, 1], [threads, 1], &arguments, ThreadOrder::Forward)
        };
        kernel.run(&launched, &mut memory).expect("it runs");
        let found = bytes_of(&[1, first + 10, 4 * u64::from(threads)], u64::to_le_bytes);
        assert_eq!(memory.get(result, 24), found, "{kind}");
    }
}

#[test]
fn another_kind_writes_and_compares_nothing() {
    let module = module(SMOKE);
    let mut memory = Window::new(AT, 64);
    run(
        &module,
        "fill",
        [1, 1],
        [4, 1],
        &[U64(AT), U64(8), U32(3), U32(0)],
        &mut memory,
    )
    .expect("it runs");
    run(
        &module,
        "check",
        [1, 1],
        [4, 1],
        &[U64(AT), U64(8), U32(3), U32(0), U64(AT + 32)],
        &mut memory,
    )
    .expect("it runs");
    assert!(memory.untouched_but(AT, 0));
}

/// What a test of the whole memory costs: 64 MiB, of which each word is computed twice.
#[test]
fn sixty_four_mebibytes_are_filled_and_checked_in_some_seconds() {
    let module = module(SMOKE);
    let words = 16 << 20;
    let mut memory = Window::new(AT, (64 << 20) + 32);
    let result = AT + (64 << 20);
    memory.put(result, &bytes_of(&[0, u64::MAX, 0], u64::to_le_bytes));
    let mut instructions = 0;
    for (name, arguments) in [
        ("fill", vec![U64(AT), U64(words), U32(2), U32(1)]),
        ("check", vec![U64(AT), U64(words), U32(2), U32(1), U64(result)]),
    ] {
        let kernel = module.kernel(name).expect("it");
        let launched = KernelLaunch {
            limit: u64::MAX,
            ..launch(kernel, [8, 1], [256, 1], &arguments, ThreadOrder::Forward)
        };
        instructions += kernel.run(&launched, &mut memory).expect("it runs").instructions;
    }
    assert_eq!(memory.get(result, 24), bytes_of(&[0, u64::MAX, words], u64::to_le_bytes));
    // The time depends on the machine. At 100 million instructions a second this is 5 s.
    assert!(instructions < 500_000_000, "{instructions}");
}
