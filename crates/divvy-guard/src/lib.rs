//! A shadow of `libcuda.so.1`, which holds the processes of a pod to their share of a GPU.
//!
//! A container finds this library under the name of CUDA's driver library. It exports the few functions that allocate and free memory or tell how much
//! there is, and needs one library: the real one, by its absolute path. Every other name is found there by the loader, also names that this library
//! has never heard of, and a missing name stays missing.
//!
//! The pod's share is in the files that `divvy-share` describes. A process that can be held to nothing (no files, files of a later version, a file that
//! somebody in the pod has broken) runs as without this library: the agent sees memory in use without a slot, and reports it.
//!
//! The guard is cooperative. A program that loads the real library by its path, or that writes into the file of usage, gets more than its share until
//! the agent sees it in the driver's own numbers.
//!
//! # Rules for this code
//!
//! It runs in other people's programs, so: no panic (a test looks for the code of one), no allocator, no signal handler, no output, no thread, no
//! constructor, no environment, no descriptor that stays open, and no lock held while the driver is called, except for the question what a pool has.
//!
//! # Build
//!
//! `cargo build --profile node -p divvy-guard --features shadow`, with no other package: features that other packages want of the dependencies would
//! bring the standard library in. Without the feature it is an ordinary library for the compiler's checks.

#![cfg_attr(feature = "shadow", no_std)]
#![allow(
    unsafe_code,
    reason = "a C ABI over another library's C ABI, and memory that other processes write"
)]
#![allow(non_snake_case, reason = "the symbols' names are NVIDIA's")]

#[macro_use]
mod hook;
#[macro_use]
mod driver;

mod arrays;
mod charge;
mod contexts;
mod cuda;
mod exports;
mod external;
mod gpu;
mod ledger;
mod linear;
mod mappings;
mod path;
mod pools;
mod process;
mod sys;
mod view;

/// There is no code that panics: a symbol that no library has stands where a panic would go, and a test checks that it is not needed.
#[cfg(feature = "shadow")]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    unsafe extern "C" {
        safe fn divvy_guard_can_panic() -> !;
    }
    divvy_guard_can_panic()
}
