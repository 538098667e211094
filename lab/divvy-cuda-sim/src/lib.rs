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
//! | `CUDA_VISIBLE_DEVICES` | which GPUs or MIG devices a process sees, as with the real driver: indices, UUIDs, and beginnings of the UUIDs of GPUs |
//! | `DIVVY_NVML_SIM_NODE` | name of a node in the description; the first node if not set |
//! | `DIVVY_NVML_SIM_LEDGER` | directory of the ledgers; if not set, each process has the whole GPU, and NVML does not know of it |
//! | `DIVVY_CUDA_SIM_VERSION` | the driver's CUDA version, such as `12.4`; the one of the described driver if not set |
//! | `DIVVY_CUDA_SIM_LOG` | a file that gets a line for each call: PID, symbol, code |
//! | `DIVVY_CUDA_SIM_FAIL` | calls that fail, such as `cuMemAlloc_v2:3=2,cuInit:*=999`: the third of cuMemAlloc_v2 in a process, each of cuInit. The name of a kernel, such as `fill:2=719`: the launch succeeds, and the context is unusable afterwards |
//! | `DIVVY_CUDA_SIM_HANG` | calls that never return (in the log with `CUDA_ERROR_NOT_READY`), and kernels that never end, such as `cuInit:1,fill:*` |
//! | `DIVVY_CUDA_SIM_WRONG` | launches that break a byte, such as `fill:3=0+1234`: after the third launch of `fill`, the byte 1234 behind the address in its parameter 0 is inverted; and copies, such as `cuMemcpyDtoDAsync:1=0+5`, by the name of the function without its version: the byte 5 of what was written |
//! | `DIVVY_CUDA_SIM_SLOW` | by what the times between events are multiplied, such as `10` or `0.1` |
//! | `DIVVY_CUDA_SIM_ATTRIBUTES` | attributes of each device that are other than described, such as `20=2` for a compute mode |
//! | `DIVVY_CUDA_SIM_MISSING` | symbols that `dlsym` does not find, and functions that `cuGetProcAddress` does not find, such as `cuEventElapsedTime` |
//! | `DIVVY_CUDA_SIM_CODE` | `unread`: PTX is not executed, as other code never is |
//! | `DIVVY_CUDA_SIM_KERNEL_NS` | how long a kernel takes, in nanoseconds, in addition to what it does; a kernel whose name ends with `_2000ns` takes 2000, and is not executed |
//!
//! # Versions
//!
//! `cuGetProcAddress` finds the functions of the driver's version, in the variant of the program's version. `dlsym` finds the symbols of the driver's version:
//! the library removes all others when it is loaded.
//! The library has 213 of the about 700 symbols of a driver: those that concern memory, contexts, and launches, and what programs need to get there.
//! It has no `cuGetExportTable`, whose tables are undocumented, so NVIDIA's runtime library does not start on it. Programs that use the driver's library
//! directly do: numba launches kernels on it.
//!
//! # Code
//!
//! A module that is PTX is compiled and executed on the processor (`divvy_ptx`), as far as the driver's version and the GPU's compute capability allow
//! it. What that crate does not know is CUDA_ERROR_INVALID_PTX; the reason is in the compiler's log, or on standard error if the program wants no
//! log. Any other code is not read: such a module has each function, and a launch only takes time.
//!
//! # Memory
//!
//! A context takes `context_mib` of the description. An allocation of 1 MiB or more takes pages of 2 MiB; smaller ones of a context share pages.
//! A pool grows by 32 MiB, or by less on a GPU that is nearly full, and gives back what is above its threshold at a synchronization. These numbers
//! are usual for drivers; which ones a GPU has must be measured on it.
//!
//! A process that ends, however it ends, has nothing in the ledger afterwards, unless a child that it forked lives on. A forked child cannot use CUDA.
//!
//! # MIG
//!
//! A process sees one MIG device of the machine, the first one or that of `CUDA_VISIBLE_DEVICES`, and no GPU besides. It has the name, the memory, and the
//! multiprocessors of its profile ([`divvy_gpu_sim::mig`]), and a ledger of its own. A GPU in MIG mode without MIG devices cannot be seen: if there is no
//! other, `cuInit` returns CUDA_ERROR_NO_DEVICE.
//!
//! # Simplifications
//!
//! - Memory is zero at first. Memory of another process, and imported memory, has contents of its own here.
//! - A launch executes the kernel before it returns, and a copy copies. Only what kernels wait for with `%globaltimer`, and what the name of a kernel
//!   says, is time that passes afterwards. A kernel that is executed cannot be a node of a graph, and a kernel of a library is compiled when the library
//!   is loaded.
//! - Managed memory counts as the GPU's as soon as it is allocated, and cannot be more than the GPU has.
//! - Memory lives until its last handle, mapping, descriptor, and import is gone, and is in the ledger of one of the processes that have it. When others have given it
//!   up, or have ended, is seen in the next call. Without a directory of ledgers, and for allocations that share a page, memory of `cuIpcGetMemHandle` ends with the
//!   process that made it.
//! - What `cuImportExternalMemory` imports counts as this process's, because no library simulates Vulkan.
//! - What is freed in a stream is free at once, and stream-ordered memory needs no order. Nodes of graphs run in the order in which they were added.
//! - All launches on a GPU run one after the other, in the order in which the processes made them. NVML's
//!   utilization of processes shows them, that of the GPU does not.
//! - What the control socket of `divvy-nvml-sim` changes is not seen here.
//! - A context that becomes unusable, and MPS, are not simulated. NVML does not know of the processes on MIG devices.
//! - Which of several mistakes in one call is reported is not always known of the real driver. Here it is: no cuInit, no context, the arguments.

#![allow(
    unsafe_code,
    reason = "a C ABI: every symbol is unmangled and writes through the caller's pointers"
)]
#![allow(non_snake_case, reason = "the symbols' names are NVIDIA's")]

mod abi;
mod card;
mod codes;
mod contents;
mod context;
mod device;
mod driver;
mod exports;
mod graph;
mod lookup;
mod machine;
mod memory;
mod module;
mod names;
mod objects;
mod pool;
mod share;
mod slab;
mod trace;
mod visible;
mod vmm;
mod work;
