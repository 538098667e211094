//! A shadow of `libnvidia-ml.so.1`, which shows the processes of a pod their share of a GPU.
//!
//! In a container, this library has the name of NVIDIA's management library. It exports the functions that report how much memory a GPU has and who
//! uses it. It needs one library: the real one, by its absolute path. The loader finds every other name there.
//!
//! | function | what a program sees |
//! |---|---|
//! | `nvmlDeviceGetMemoryInfo` (also `_v2`) | the pod's share as the total, and what the pod uses of it (`memory.rs`) |
//! | `nvmlDeviceGetComputeRunningProcesses` (also `_v2`, `_v3`) | the container's processes, by their ids in the container (`processes.rs`) |
//! | `nvmlDeviceGetGraphicsRunningProcesses` and `nvmlDeviceGetMPSComputeRunningProcesses` (also `_v2`, `_v3`) | no process |
//!
//! `nvmlSystemGetProcessName` is the driver's own: it reads `/proc` of the container that asks
//! (<https://github.com/NVIDIA/nvidia-docker/issues/1483>), so it knows the ids that this library shows.
//!
//! The library reads the share from the files that `divvy-share` describes. It returns the driver's own answers in these cases: the pod has no share of the GPU;
//! the file of limits cannot be read, or is of a later version; the question is about a part of a GPU (MIG). It always asks the driver first, and changes
//! only successful answers. So all errors are the driver's.
//!
//! # Limits of the view
//!
//! This is a view and no protection. A program that loads the real library by its path sees the whole GPU. Utilization and accounting are the driver's.
//!
//! A driver that lacks one of the functions here, such as one before 510 with `…_v3`, does not lack it for `dlsym`, because this library has it. It then
//! returns `NVML_ERROR_FUNCTION_NOT_FOUND`, which NVIDIA's Python bindings also report for a symbol that is missing. But programs that choose a version
//! by what `dlsym` finds choose one that the driver does not have. For this reason, `nvmlDeviceGetRunningProcessDetailList` is not replaced: programs
//! recognize the drivers with a larger structure in `…_v3` by the absence of this function, as nvitop does in `nvitop/api/libnvml.py`.
//!
//! # Rules and build
//!
//! They are those of `divvy-guard`: no code that panics, no allocator, no constructor, no version of the C library. Nothing is kept between calls, so there
//! is nothing to repair after fork(2), and no open file. `cargo build --profile node -p divvy-guard-nvml --features shadow`, without any other package.

#![cfg_attr(feature = "shadow", no_std)]
#![allow(unsafe_code, reason = "a C ABI over another library's C ABI")]
#![allow(non_snake_case, reason = "the symbols' names are NVIDIA's")]

mod driver;
mod exports;
mod memory;
mod nvml;
mod processes;
mod share;
