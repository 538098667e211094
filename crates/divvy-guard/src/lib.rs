//! A shadow of `libcuda.so.1`, which holds the processes of a pod to their share of a GPU.
//!
//! In a container, this library has the name of CUDA's driver library. It exports only the functions that allocate memory, free memory, report how
//! much there is, or launch kernels. It needs one library: the real one, by its absolute path. The loader finds every other name there, including
//! names that this library does not know, and a name that the driver lacks is still missing.
//!
//! The pod's share is in the files that `divvy-share` describes. If the file of limits is missing or has a later version, the process runs as if this
//! library did not exist. The agent sees memory in use without a slot, and reports it. If the limits can be read, and only the file of usage cannot be used,
//! a program in the pod has damaged it: then the process gets no memory until the file is whole again, as if the share were full. Launches are held all the
//! same, because the pod's balance of compute time is in the file of limits.
//!
//! Launches are held only where the pod has a limit of compute time (`launches`). Elsewhere `cuGetProcAddress`, which CUDA's runtime library uses, gives the
//! driver's own functions. The functions that `dlsym` finds test whether the driver's function is known, which is one predictable branch.
//!
//! The guard cannot stop a program that avoids it. A program that loads the real library by its path, or writes into the file of usage, gets more than
//! its share until the agent sees it in the driver's own numbers.
//!
//! # Rules for this code
//!
//! It runs in other people's programs. Therefore it has no code that panics (a test checks this), no allocator, no signal handler, no output, no thread,
//! and no constructor. It reads no environment variable and keeps no file descriptor open. It holds no lock while it calls the driver, except when it asks
//! how much memory a pool has.
//!
//! # Build
//!
//! `cargo build --profile node -p divvy-guard --features shadow`, without any other package, because other packages enable features of the dependencies
//! that need the standard library. Without the feature, it is an ordinary library for the compiler's checks.

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
mod current;
mod exports;
mod external;
mod gpu;
mod launches;
mod ledger;
mod linear;
mod mappings;
mod pools;
mod process;
mod view;

use divvy_shadow::{path, sys};
