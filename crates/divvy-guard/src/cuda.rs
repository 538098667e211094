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

/// `CUmemAllocationProp` and `CUmemPoolProps`, up to what the guard reads: they begin alike.
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

/// `CUDA_MEM_ALLOC_NODE_PARAMS`, up to what the guard reads.
#[repr(C)]
pub(crate) struct AllocationNode {
    pub(crate) pool: AllocationProp,
    rest_of_pool: [u64; 9],
    access: *const c_void,
    access_count: usize,
    pub(crate) bytes: u64,
}

/// `CU_GRAPH_NODE_TYPE_MEM_ALLOC`.
pub(crate) const ALLOCATION_NODE: c_int = 10;

/// `CUgraphNodeParams`, up to what the guard reads. The driver demands all of it, so the part of another type of node can be read as well.
#[repr(C)]
pub(crate) struct Node {
    pub(crate) kind: c_int,
    reserved: [c_int; 3],
    pub(crate) allocation: AllocationNode,
}

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`, up to what the guard reads.
#[repr(C)]
pub(crate) struct ExternalMemory {
    kind: c_int,
    handle: [usize; 2],
    pub(crate) bytes: u64,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Parameters {
    function: u64,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    pub(crate) stream: u64,
    parameters: *mut c_void,
}

// As the C compiler lays them out.
const _: () = assert!(size_of::<AllocationProp>() == 16 && core::mem::offset_of!(AllocationNode, bytes) == 104);
const _: () = assert!(core::mem::offset_of!(Node, allocation) == 16 && core::mem::offset_of!(ExternalMemory, bytes) == 24);
const _: () = assert!(size_of::<Parameters>() == 56 && core::mem::offset_of!(Parameters, stream) == 40);
