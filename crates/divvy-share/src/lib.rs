//! The two files that a pod has for each of its GPUs, and how its processes share what the pod may use.
//!
//! [`limits`] is written by the agent; containers can only read it. [`usage`] has a slot for each process that uses the GPU; the processes write
//! it. [`reserve`] is how a process asks for memory, [`claim`] how it gets its slot, and [`compute`] how launches are held to a rate.
//!
//! There is no shared total of the memory in use and no shared mutex, so there is nothing to repair when a process is killed. A process owns its
//! slot by an open file description lock (fcntl(2), `F_OFD_SETLK`) on one byte of `usage`. The kernel drops the lock when the last process that has the
//! description open or mapped is gone: then the slot does not count any more.
//!
//! # Files
//!
//! A container has them in `<DIRECTORY>/GPU-<UUID>/`, with the UUID as the driver writes it:
//!
//! | file | in the container | who may write it |
//! |---|---|---|
//! | `limits` | mounted read-only, mode 0644 | the agent, in place: [`limits::ShareLimits::copy`] |
//! | `usage` | mounted for writing, mode 0666 | every process of the pod: containers have any user |
//!
//! All containers of a pod have the same two files, because the share is the pod's. The agent makes them with their full size before the pod starts
//! and never shortens them: a process has them mapped, and a mapped page that is gone ends it (SIGBUS). A container that shortens `usage` ends
//! processes of its own pod, and no others.
//!
//! This crate has no I/O and no unsafe code, and needs no standard library: the guard, which lives in other people's processes, and the agent use
//! the same functions.

#![no_std]

/// Where a container has its shares. No variable and no option names another place, or a container could choose its limits.
pub const DIRECTORY: &str = "/run/divvy/share";
/// The file's name in the directory of a GPU.
pub const LIMITS: &str = "limits";
/// The file's name in the directory of a GPU.
pub const USAGE: &str = "usage";
/// Where a container has CUDA's real driver library. The guard needs it by this path.
pub const REAL_CUDA: &str = "/run/divvy/guard/libcuda.so.real";
/// Where a container has the real NVML. Its shadow needs it by this path.
pub const REAL_NVML: &str = "/run/divvy/guard/libnvidia-ml.so.real";
/// Where a container has the guard, whatever the driver's library is called and wherever it lies. What puts the guard in the place of another copy of the
/// driver's library finds it here.
pub const GUARD_CUDA: &str = "/run/divvy/guard/libcuda.so.1";
/// The same for the shadow of NVML.
pub const GUARD_NVML: &str = "/run/divvy/guard/libnvidia-ml.so.1";

/// Where a container has the library that makes the dynamic loader use the guard for other copies of the driver's libraries (`divvy-guard-audit`).
pub const AUDIT: &str = "/run/divvy/guard/libdivvy-guard-audit.so";
/// The value of `GLIBC_TUNABLES` with which a program with an audit library starts if it needs jemalloc. With an audit library, glibc allots the memory for
/// thread-local variables before it knows the program's other libraries. So what they need at fixed places must fit into what is kept for libraries that come
/// later: 1.7 KB by default, where jemalloc needs 2.6 KB. Each thread has this memory on its stack, and stacks can be as small as 16 KB.
pub const TUNABLES: &str = "glibc.rtld.optional_static_tls=8192";

pub mod claim;
pub mod compute;
pub mod limits;
pub mod reserve;
pub mod usage;
