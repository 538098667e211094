//! One fuzz target under libFuzzer, which keeps the inputs that reach new code and finds the values that the code compares with.
//! `cargo xtask fuzz` builds this with counters in Divvy's crates, and runs it for every target.
//!
//! `DIVVY_FUZZ_TARGET` names the target; the arguments are libFuzzer's. The counters are LLVM's (SanitizerCoverage), which a stable compiler
//! supports as well. No sanitizer is linked.

#![no_main]

use divvy_fuzz::chance::Chance;
use divvy_fuzz::targets::{self, FuzzTarget};
use libfuzzer_sys::{fuzz_mutator, fuzz_target};

thread_local! {
    // libFuzzer reads all inputs on one thread.
    static TARGET: FuzzTarget = chosen();
}

fn chosen() -> FuzzTarget {
    let name = std::env::var("DIVVY_FUZZ_TARGET").unwrap_or_default();
    let target = targets::targets().into_iter().find(|target| target.name == name);
    target.unwrap_or_else(|| panic!("DIVVY_FUZZ_TARGET is {name:?}, but there is no such target"))
}

fuzz_target!(|input: &[u8]| {
    TARGET.with(|target| {
        if let Err(why) = target.run(input) {
            panic!("{why}");
        }
    });
});

// Half of the changes come from libFuzzer, which knows the values that the code compares with. The other half are this crate's, which keep
// JSON valid.
fuzz_mutator!(|data: &mut [u8], size: usize, max_size: usize, seed: u32| {
    let mut chance = Chance((u64::from(seed) << 16) | 1);
    // The first numbers after a small seed are similar.
    let ours = (0..8).map(|_| chance.below(2)).last() == Some(0);
    let mut input = data[..size].to_vec();
    if ours {
        chance.change(&mut input);
    }
    if !ours || input.len() > max_size {
        return libfuzzer_sys::fuzzer_mutate(data, size, max_size);
    }
    data[..input.len()].copy_from_slice(&input);
    input.len()
});
