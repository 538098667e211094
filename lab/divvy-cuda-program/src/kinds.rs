//! The ways in which a program gets memory of a GPU, besides `cuMemAlloc`.

#![allow(unsafe_code, reason = "it calls a C ABI")]

use std::ffi::{c_int, c_uint};
use std::ptr;

use anyhow::{Result, bail};

use crate::cuda::{CallResult, CudaLibrary, call, function};
use crate::kernel::synchronize;

/// CU_MEM_LOCATION_TYPE_DEVICE and CU_MEM_ALLOCATION_TYPE_PINNED.
const ON_DEVICE: c_int = 1;
const PINNED: c_int = 1;
/// CU_MEM_ATTACH_GLOBAL.
const GLOBAL: c_uint = 1;
/// CU_AD_FORMAT_FLOAT, with four channels. A row has 256 KiB: an array has at most 65536 rows.
const FLOAT: c_uint = 0x20;
const CHANNELS: c_uint = 4;
const ROW: u64 = 16384;

/// `CUmemAllocationProp` of cuda.h.
#[repr(C)]
struct MemAllocationProp {
    kind: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    win32: usize,
    flags: [u8; 8],
}

/// `CUDA_ARRAY_DESCRIPTOR_v2` of cuda.h.
#[repr(C)]
struct ArrayDescriptor {
    width: u64,
    height: u64,
    format: c_uint,
    channels: c_uint,
}

/// `CUDA_MEM_ALLOC_NODE_PARAMS_v1` of cuda.h, with its `CUmemPoolProps_v1`.
#[repr(C)]
struct AllocNodeParams {
    kind: c_int,
    handle_types: c_int,
    location: [c_int; 2],
    security: usize,
    max_size: u64,
    usage: u16,
    reserved: [u8; 54],
    access: *const u64,
    access_count: u64,
    bytes: u64,
    pointer: u64,
}

const _: () = assert!(size_of::<MemAllocationProp>() == 32 && size_of::<ArrayDescriptor>() == 24);
const _: () = assert!(size_of::<AllocNodeParams>() == 120 && std::mem::offset_of!(AllocNodeParams, bytes) == 104);

/// The names of the kinds.
pub(crate) const KINDS: [&str; 7] = ["linear", "pitch", "managed", "vmm", "pool", "array", "graph"];

/// Allocate memory of a kind, and keep it until the process ends.
pub(crate) fn allocate(cuda: &CudaLibrary, kind: &str, mib: u64) -> Result<()> {
    let bytes = mib << 20;
    let mut pointer = 0_u64;
    // The places for results are valid in all calls, and structures have cuda.h's layout.
    match kind {
        "linear" => call!(cuda, "cuMemAlloc_v2"(&raw mut pointer => *mut u64, bytes => u64)),
        "pitch" => {
            let mut pitch = 0_u64;
            // Rows of 1 MiB.
            call!(cuda, "cuMemAllocPitch_v2"(&raw mut pointer => *mut u64, &raw mut pitch => *mut u64, 1 << 20 => u64, mib => u64, 4 => c_uint))
        }
        "managed" => call!(cuda, "cuMemAllocManaged"(&raw mut pointer => *mut u64, bytes => u64, GLOBAL => c_uint)),
        "vmm" => {
            let prop = MemAllocationProp {
                kind: PINNED,
                handle_types: 0,
                location: [ON_DEVICE, 0],
                win32: 0,
                flags: [0; 8],
            };
            call!(cuda, "cuMemCreate"(&raw mut pointer => *mut u64, bytes => u64, &raw const prop => *const MemAllocationProp, 0 => u64))
        }
        "pool" => {
            call!(cuda, "cuMemAllocAsync"(&raw mut pointer => *mut u64, bytes => u64, 0 => usize))?;
            synchronize(cuda)
        }
        "array" => {
            let descriptor = ArrayDescriptor {
                width: ROW,
                height: mib * 4,
                format: FLOAT,
                channels: CHANNELS,
            };
            let mut array = 0_usize;
            call!(cuda, "cuArrayCreate_v2"(&raw mut array => *mut usize, &raw const descriptor => *const ArrayDescriptor))
        }
        "graph" => {
            let mut node = AllocNodeParams {
                kind: PINNED,
                handle_types: 0,
                location: [ON_DEVICE, 0],
                security: 0,
                max_size: 0,
                usage: 0,
                reserved: [0; 54],
                access: ptr::null(),
                access_count: 0,
                bytes,
                pointer: 0,
            };
            let (mut graph, mut added, mut executable) = (0_usize, 0_usize, 0_usize);
            call!(cuda, "cuGraphCreate"(&raw mut graph => *mut usize, 0 => c_uint))?;
            call!(cuda, "cuGraphAddMemAllocNode"(&raw mut added => *mut usize, graph => usize, ptr::null() => *const usize, 0 => usize,
                &raw mut node => *mut AllocNodeParams))?;
            // CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH is not set: the graph is launched once.
            call!(cuda, "cuGraphInstantiateWithFlags"(&raw mut executable => *mut usize, graph => usize, 0 => u64))?;
            call!(cuda, "cuGraphLaunch"(executable => usize, 0 => usize))?;
            synchronize(cuda)
        }
        _ => bail!("{kind} is none of {}", KINDS.join(", ")),
    }
}

/// Allocate and free so many times. Return nanoseconds for each pair.
pub(crate) fn pairs(cuda: &CudaLibrary, count: u32, bytes: u64) -> Result<u64> {
    let allocate = function!(cuda, "cuMemAlloc_v2"(*mut u64, u64))?;
    let free = function!(cuda, "cuMemFree_v2"(u64))?;
    let pair = || {
        let mut pointer = 0_u64;
        // SAFETY: the place for the result is valid.
        CallResult::from(unsafe { allocate(&raw mut pointer, bytes) }).ok("cuMemAlloc", cuda)?;
        // SAFETY: it was just allocated, and is not used.
        CallResult::from(unsafe { free(pointer) }).ok("cuMemFree", cuda)
    };
    pair()?;
    let began = std::time::Instant::now();
    (0..count).try_for_each(|_| pair())?;
    Ok(u64::try_from(began.elapsed().as_nanos() / u128::from(count.max(1)))?)
}

/// Free linear memory.
pub(crate) fn free(cuda: &CudaLibrary, pointer: u64) -> Result<()> {
    // The caller has allocated it, and forgets it.
    call!(cuda, "cuMemFree_v2"(pointer => u64))
}
