//! The part of nvml.h that the library needs. The names are NVIDIA's.

use core::ffi::{c_int, c_uint, c_void};

/// `nvmlReturn_t`.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const INVALID_ARGUMENT: Code = 2;
pub(crate) const INSUFFICIENT_SIZE: Code = 7;
pub(crate) const FUNCTION_NOT_FOUND: Code = 13;

/// `nvmlDevice_t`.
pub(crate) type Device = *mut c_void;
/// `unsigned int`.
pub(crate) type Uint = c_uint;

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memory {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Memory2 {
    pub(crate) version: Uint,
    pub(crate) total: u64,
    pub(crate) reserved: u64,
    pub(crate) free: u64,
    pub(crate) used: u64,
}

/// `nvmlMemory_v2`: the size of the structure, and its version.
pub(crate) const MEMORY_2: Uint = 40 | 2 << 24;

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process {
    pub(crate) pid: Uint,
    pub(crate) used: u64,
}

/// `nvmlProcessInfo_v2_t`, which `…_v3` of the functions has as well.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process2 {
    pub(crate) process: Process,
    pub(crate) gpu_instance: Uint,
    pub(crate) compute_instance: Uint,
}

/// What `…_v3` of the functions has in drivers from 535.43 to 535.86.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Process3 {
    pub(crate) process: Process2,
    pub(crate) protected: u64,
}

/// A GPU or compute instance, if there is none.
pub(crate) const NO_INSTANCE: Uint = Uint::MAX;

// As the C compiler lays them out.
const _: () = assert!(size_of::<Memory>() == 24 && size_of::<Memory2>() == 40);
const _: () = assert!(size_of::<Process>() == 16 && size_of::<Process2>() == 24 && size_of::<Process3>() == 32);
