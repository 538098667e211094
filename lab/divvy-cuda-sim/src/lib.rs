//! A simulated `libcuda.so.1` that needs no GPU, for tests of what lies between a program and the driver.
//!
//! The library has CUDA's C ABI (cuda.h of the CUDA Toolkit) over the machine description that `divvy-nvml-sim` reads. It counts memory as the driver
//! does, in a ledger that `divvy-nvml-sim` reads, too: what NVML says a process has is what this library gave it.
//!
//! # Environment
//!
//! | variable | meaning |
//! |---|---|
//! | `DIVVY_NVML_SIM` | path of the machine description ([`divvy_model::machine`]) |
//! | `DIVVY_NVML_SIM_NODE` | name of a node in the description; the first node if not set |
//! | `DIVVY_NVML_SIM_LEDGER` | directory of the ledgers; if not set, each process has the whole GPU, and NVML does not know of it |
//! | `DIVVY_CUDA_SIM_VERSION` | the driver's CUDA version, such as `12.4`; the one of the described driver if not set |
//! | `DIVVY_CUDA_SIM_LOG` | a file that gets a line for each call: PID, symbol, code |
//! | `DIVVY_CUDA_SIM_FAIL` | calls that fail, such as `cuMemAlloc_v2:3=2,cuInit:*=999`: the third of cuMemAlloc_v2 in a process, each of cuInit |
//! | `DIVVY_CUDA_SIM_KERNEL_NS` | how long a kernel takes, in nanoseconds; a kernel whose name ends with `_2000ns` takes 2000 |
//!
//! # Versions
//!
//! `cuGetProcAddress` finds the functions of the driver's version, in the variant of the program's version. `dlsym` finds all symbols, because one
//! file has one set of them. The program `divvy-cuda-sim` writes a copy of the library that has only the symbols of a version, for `dlsym` as well.
//! The library has 208 of the about 700 symbols of a driver: those that concern memory, contexts, and launches, and what programs need to get there.
//! It has no `cuGetExportTable`, whose tables are undocumented, so NVIDIA's runtime library does not start on it. Programs that use the driver's library
//! directly do: numba launches kernels on it.
//!
//! # Memory
//!
//! A context takes `context_mib` of the description. An allocation of 1 MiB or more takes pages of 2 MiB; smaller ones of a context share pages.
//! A pool grows by 32 MiB, or by less on a GPU that is nearly full, and gives back what is above its threshold at a synchronization. These numbers
//! are usual for drivers; which ones a GPU has must be measured on it.
//!
//! A process that ends, however it ends, has nothing in the ledger afterwards, unless a child that it forked lives on. A forked child cannot use CUDA.
//!
//! # Simplifications
//!
//! - Memory of the GPU has no contents. A copy to main memory writes zeros.
//! - Managed memory counts as the GPU's as soon as it is allocated, and cannot be more than the GPU has.
//! - Memory that another process imports ends with the process that made it. The real driver keeps it for the importer.
//! - What `cuImportExternalMemory` imports counts as this process's, because no library simulates Vulkan.
//! - What is freed in a stream is free at once, and stream-ordered memory needs no order. Nodes of graphs run in the order in which they were added.
//! - All launches on a GPU run one after the other, in the order in which the processes made them. NVML's
//!   utilization of processes shows them, that of the GPU does not.
//! - What the control socket of `divvy-nvml-sim` changes is not seen here.
//! - A context that becomes unusable, MPS, MIG devices, and `CUDA_VISIBLE_DEVICES` are not simulated.
//! - Which of several mistakes in one call is reported is not always known of the real driver. Here it is: no cuInit, no context, the arguments.

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
mod lookup;
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
