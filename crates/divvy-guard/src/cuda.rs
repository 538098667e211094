//! The part of cuda.h that the guard needs. The names are NVIDIA's.

use core::ffi::{c_int, c_uint, c_void};

/// `CUresult`.
pub(crate) type Code = c_int;

pub(crate) const SUCCESS: Code = 0;
pub(crate) const OUT_OF_MEMORY: Code = 2;
pub(crate) const NOT_FOUND: Code = 500;
pub(crate) const NOT_SUPPORTED: Code = 801;

/// `CU_MEM_LOCATION_TYPE_DEVICE`.
pub(crate) const DEVICE: c_int = 1;

/// `CUmemAllocationProp`, up to what the guard reads.
#[repr(C)]
pub(crate) struct AllocationProp {
    kind: c_int,
    handle_types: c_int,
    pub(crate) location_type: c_int,
    pub(crate) location_id: c_int,
}

/// `CUuuid`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct Uuid(pub(crate) [u8; 16]);

/// `CUdevice`.
pub(crate) type Device = c_int;
/// `CUcontext`, `CUgreenCtx`.
pub(crate) type Context = *mut c_void;
/// `CUdeviceptr`.
pub(crate) type Pointer = u64;
/// `CUmemGenericAllocationHandle`.
pub(crate) type Handle = u64;
/// `unsigned int`.
pub(crate) type Uint = c_uint;
