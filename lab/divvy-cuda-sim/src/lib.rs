//! A simulated `libcuda.so.1` that needs no GPU, for tests of what lies between a program and the driver.
//!
//! The library has CUDA's C ABI (cuda.h of the CUDA Toolkit) over the machine description that `divvy-nvml-sim` reads. It keeps the books of memory
//! as the driver does, in a ledger that `divvy-nvml-sim` reads, too: what NVML says a process has is what this library gave it.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `DIVVY_NVML_SIM` | path of the machine description ([`divvy_model::machine`]) |
//! | `DIVVY_NVML_SIM_NODE` | name of a node in the description; the first node if not set |
//! | `DIVVY_NVML_SIM_LEDGER` | directory of the ledgers; if not set, each process has the whole GPU, and NVML knows nothing of it |
//! | `DIVVY_CUDA_SIM_VERSION` | the driver's CUDA version, such as `12.4`; the one of the described driver if not set |
//! | `DIVVY_CUDA_SIM_LOG` | a file that gets a line for each call: PID, symbol, code |
//! | `DIVVY_CUDA_SIM_FAIL` | calls that fail, such as `cuMemAlloc_v2:3=2,cuInit:*=999`: the third call of cuMemAlloc_v2 in a process, each of cuInit |
//!
//! # Versions
//!
//! One ELF file has one set of symbols, so `dlsym` finds all symbols in each version. `cuGetProcAddress` finds the symbols of the version.

#![allow(
    unsafe_code,
    reason = "a C ABI: every symbol is unmangled and writes through the caller's pointers"
)]
#![allow(non_snake_case, reason = "the symbols' names are NVIDIA's")]

mod abi;
mod codes;
mod context;
mod device;
mod driver;
mod graph;
mod machine;
mod memory;
mod names;
mod objects;
mod pool;
mod share;
mod slab;
mod trace;
mod vmm;
mod work;
