//! The functions that the guard has in place of the driver's. All other names the loader finds in the real library.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::sync::atomic::Ordering;

use crate::arrays::{Deep, Flat};
use crate::contexts;
use crate::cuda::{
    AllocationNode, AllocationProp, Code, Context, Device, ExternalMemory, Handle, NOT_FOUND, Node, Parameters, Pointer, SUCCESS,
    Uint,
};
use crate::hook::{LONGEST, find};
use crate::{arrays, external, launches, linear, mappings, pools, view};

/// What the driver has just written for the program.
///
/// # Safety
///
/// The driver succeeded with this pointer.
unsafe fn given<T: Copy>(pointer: *mut T) -> T {
    // SAFETY: the driver has written to it. A program may have given an unaligned pointer.
    unsafe { pointer.read_unaligned() }
}

macro_rules! out {
    ($pointer:ident) => {
        // SAFETY: the rules read what the driver has written only after it succeeded.
        || unsafe { given($pointer) } as u64
    };
}

macro_rules! shape {
    ($pointer:ident) => {
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { $pointer.as_ref() }.copied().map(Into::into)
    };
}

hooks! {
    // Entry.
    fn cuGetProcAddress(name: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64) 11030: |call|
        instead(name, address, call());
    fn cuGetProcAddress_v2(name: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64,
        status: *mut c_int) 12000: |call|
        instead(name, address, call());

    // Linear memory. The functions without a suffix are those before CUDA 3.2, with 32-bit numbers.
    fn cuMemAlloc(pointer: *mut Uint, bytes: Uint) 2000: |call|
        linear::allocate(bytes.into(), call, out!(pointer));
    fn cuMemAlloc_v2(pointer: *mut Pointer, bytes: usize) 3020: |call|
        linear::allocate(bytes as u64, call, out!(pointer));
    fn cuMemAllocPitch(pointer: *mut Uint, pitch: *mut Uint, width: Uint, height: Uint, element: Uint) 2000: |call|
        linear::allocate_rows(width.into(), height.into(), call, out!(pointer), out!(pitch));
    fn cuMemAllocPitch_v2(pointer: *mut Pointer, pitch: *mut usize, width: usize, height: usize, element: Uint) 3020: |call|
        linear::allocate_rows(width as u64, height as u64, call, out!(pointer), out!(pitch));
    fn cuMemAllocManaged(pointer: *mut Pointer, bytes: usize, flags: Uint) 6000: |call|
        linear::allocate_managed(bytes as u64, call, out!(pointer));
    fn cuMemFree(pointer: Uint) 2000: |call| linear::free(pointer.into(), call);
    fn cuMemFree_v2(pointer: Pointer) 3020: |call| linear::free(pointer, call);

    // The view.
    fn cuMemGetInfo(free: *mut Uint, total: *mut Uint) 2000: |call|
        // SAFETY: the driver gets the same pointers.
        unsafe { view::memory(free, total, call) };
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) 3020: |call|
        // SAFETY: the driver gets the same pointers.
        unsafe { view::memory(free, total, call) };
    fn cuDeviceTotalMem(bytes: *mut Uint, device: Device) 2000: |call|
        // SAFETY: the driver gets the same pointer.
        unsafe { view::total(bytes, device, call) };
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: Device) 3020: |call|
        // SAFETY: the driver gets the same pointer.
        unsafe { view::total(bytes, device, call) };

    // Contexts.
    fn cuDevicePrimaryCtxRetain(context: *mut Context, device: Device) 7000: |call|
        contexts::retain(device, call);
    fn cuDevicePrimaryCtxRelease(device: Device) 7000: |call| contexts::release(device, call);
    fn cuDevicePrimaryCtxRelease_v2(device: Device) 11000: |call| contexts::release(device, call);
    fn cuDevicePrimaryCtxReset(device: Device) 7000: |call| contexts::release(device, call);
    fn cuDevicePrimaryCtxReset_v2(device: Device) 11000: |call| contexts::release(device, call);
    fn cuCtxCreate(context: *mut Context, flags: Uint, device: Device) 2000: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxCreate_v2(context: *mut Context, flags: Uint, device: Device) 3020: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxCreate_v3(context: *mut Context, affinity: *mut c_void, count: c_int, flags: Uint, device: Device) 11040: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxCreate_v4(context: *mut Context, parameters: *mut c_void, flags: Uint, device: Device) 12050: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxDestroy(context: Context) 2000: |call| contexts::destroy(context.addr() as u64, call);
    fn cuCtxDestroy_v2(context: Context) 4000: |call| contexts::destroy(context.addr() as u64, call);

    fn cuGreenCtxCreate(context: *mut Context, resources: *mut c_void, device: Device, flags: Uint) 12040: |call|
        contexts::create_green(device, call, out!(context));
    fn cuGreenCtxDestroy(context: Context) 12040: |call| contexts::destroy_green(context.addr() as u64, call);

    // Physical memory and its mappings.
    fn cuMemCreate(handle: *mut Handle, bytes: usize, prop: *const AllocationProp, flags: u64) 10020: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        { let made = out!(handle); unsafe { mappings::create(bytes as u64, prop, call, made) } };
    fn cuMemRelease(handle: Handle) 10020: |call| mappings::release(handle, call);
    fn cuMemRetainAllocationHandle(handle: *mut Handle, address: *mut c_void) 11000: |call|
        mappings::retain(call, out!(handle));
    fn cuMemMap(pointer: Pointer, size: usize, offset: usize, handle: Handle, flags: u64) 10020: |call|
        mappings::map(pointer, size as u64, handle, call);
    fn cuMemUnmap(pointer: Pointer, size: usize) 10020: |call| mappings::unmap(pointer, size as u64, call);

    // Pools. The functions with the suffix are those for programs whose default stream is the thread's own. The rules get references to closures: each rule
    // is long, and is in the library once.
    fn cuMemAllocAsync(pointer: *mut Pointer, bytes: usize, stream: u64) 11020: |call|
        pools::allocate(bytes as u64, stream, &call);
    fn cuMemAllocAsync_ptsz(pointer: *mut Pointer, bytes: usize, stream: u64) 11020: |call|
        pools::allocate(bytes as u64, stream, &call);
    fn cuMemAllocFromPoolAsync(pointer: *mut Pointer, bytes: usize, pool: u64, stream: u64) 11020: |call|
        pools::allocate_from(pool, bytes as u64, &call);
    fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut Pointer, bytes: usize, pool: u64, stream: u64) 11020: |call|
        pools::allocate_from(pool, bytes as u64, &call);
    fn cuMemPoolCreate(pool: *mut u64, prop: *const AllocationProp) 11020: |call| {
        let made = out!(pool);
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::create(prop, call, made) }
    };
    fn cuMemPoolDestroy(pool: u64) 11020: |call| pools::destroy(pool, call);
    fn cuMemPoolTrimTo(pool: u64, keep: usize) 11020: |call| pools::change(pool, call);
    fn cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: *mut c_void) 11020: |call|
        pools::change(pool, call);
    fn cuCtxSynchronize() 2000: |call| pools::synchronize(call);
    fn cuCtxSynchronize_v2(context: Context) 13000: |call| pools::synchronize(call);
    fn cuStreamSynchronize(stream: u64) 2000: |call| pools::synchronize(call);
    fn cuStreamSynchronize_ptsz(stream: u64) 7000: |call| pools::synchronize(call);
    fn cuEventSynchronize(event: u64) 2000: |call| pools::synchronize(call);

    // Arrays.
    fn cuArrayCreate(array: *mut u64, shape: *const Flat<u32>) 2000: |call|
        arrays::create(shape!(shape), 1, call, out!(array));
    fn cuArrayCreate_v2(array: *mut u64, shape: *const Flat<u64>) 3020: |call|
        arrays::create(shape!(shape), 1, call, out!(array));
    fn cuArray3DCreate(array: *mut u64, shape: *const Deep<u32>) 2000: |call|
        arrays::create(shape!(shape), 1, call, out!(array));
    fn cuArray3DCreate_v2(array: *mut u64, shape: *const Deep<u64>) 3020: |call|
        arrays::create(shape!(shape), 1, call, out!(array));
    fn cuMipmappedArrayCreate(array: *mut u64, shape: *const Deep<u64>, levels: Uint) 5000: |call|
        arrays::create(shape!(shape), levels, call, out!(array));
    fn cuArrayDestroy(array: u64) 2000: |call| arrays::destroy(array, call);
    fn cuMipmappedArrayDestroy(array: u64) 5000: |call| arrays::destroy(array, call);

    // Graphs.
    fn cuGraphAddMemAllocNode(node: *mut u64, graph: u64, from: *const u64, count: usize, parameters: *mut AllocationNode) 11040: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::add_node(parameters, call) };
    fn cuGraphAddNode(node: *mut u64, graph: u64, from: *const u64, count: usize, parameters: *mut Node) 12020: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::add_any_node(parameters, call) };
    fn cuGraphAddNode_v2(node: *mut u64, graph: u64, from: *const u64, edges: *const c_void, count: usize, parameters: *mut Node) 12030: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::add_any_node(parameters, call) };
    fn cuGraphLaunch(graph: u64, stream: u64) 10000: |call| launch_graph(call);
    fn cuGraphLaunch_ptsz(graph: u64, stream: u64) 10000: |call| launch_graph(call);
    fn cuGraphExecDestroy(graph: u64) 10000: |call| pools::synchronize(call);
    fn cuDeviceGraphMemTrim(device: Device) 11040: |call| pools::synchronize(call);

    // Imports. What other processes have allocated with CUDA is charged to them.
    fn cuImportExternalMemory(memory: *mut u64, description: *const ExternalMemory) 10000: |call| {
        let made = out!(memory);
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { external::import(description, call, made) }
    };
    fn cuDestroyExternalMemory(memory: u64) 10000: |call| external::destroy(memory, call);

    launches:
    fn cuLaunchKernel(function: u64, gx: Uint, gy: Uint, gz: Uint, bx: Uint, by: Uint, bz: Uint, shared: Uint, stream: u64,
        parameters: *mut c_void, extra: *mut c_void) 4000: launches::on_current;
    fn cuLaunchKernel_ptsz(function: u64, gx: Uint, gy: Uint, gz: Uint, bx: Uint, by: Uint, bz: Uint, shared: Uint, stream: u64,
        parameters: *mut c_void, extra: *mut c_void) 7000: launches::on_current;
    fn cuLaunchKernelEx(config: *const c_void, function: u64, parameters: *mut c_void, extra: *mut c_void) 11060: launches::on_current;
    fn cuLaunchKernelEx_ptsz(config: *const c_void, function: u64, parameters: *mut c_void, extra: *mut c_void) 11060: launches::on_current;
    fn cuLaunchCooperativeKernel(function: u64, gx: Uint, gy: Uint, gz: Uint, bx: Uint, by: Uint, bz: Uint, shared: Uint, stream: u64,
        parameters: *mut c_void) 9000: launches::on_current;
    fn cuLaunchCooperativeKernel_ptsz(function: u64, gx: Uint, gy: Uint, gz: Uint, bx: Uint, by: Uint, bz: Uint, shared: Uint,
        stream: u64, parameters: *mut c_void) 9000: launches::on_current;
    // SAFETY: the driver gets the same arguments.
    fn cuLaunchCooperativeKernelMultiDevice(launches: *mut Parameters, count: Uint, flags: Uint) 9000: || unsafe { launches::on_each(launches, count) };
    // The functions before CUDA 4.
    fn cuLaunch(function: u64) 2000: launches::on_current;
    fn cuLaunchGrid(function: u64, width: c_int, height: c_int) 2000: launches::on_current;
    fn cuLaunchGridAsync(function: u64, width: c_int, height: c_int, stream: u64) 2000: launches::on_current;
}

/// A launch of a graph may take memory, and it takes compute time.
fn launch_graph(call: impl FnOnce() -> Code) -> Code {
    launches::graph();
    pools::synchronize(call)
}

/// Give the program the guard's function, if the driver gave it exactly one that the guard replaces.
fn instead(name: *const c_char, address: *mut *mut c_void, code: Code) -> Code {
    if code != SUCCESS || address.is_null() || name.is_null() {
        return code;
    }
    // SAFETY: the driver succeeded with this pointer.
    let found = unsafe { given(address) };
    if found.is_null() {
        // A driver may succeed and tell by the status that it has no such function.
        return code;
    }
    let mut length = 0;
    // SAFETY: the driver succeeded with this name, so it ends with 0. Longer names are not those of the guard's functions.
    while length < LONGEST && unsafe { name.wrapping_add(length).read() } != 0 {
        length = length.wrapping_add(1);
    }
    // SAFETY: the bytes were just read.
    let name = unsafe { core::slice::from_raw_parts(name.cast(), length) };
    let place = find(&HOOKS, &BASES, name, found, ask).filter(|place| *place < LAUNCHES || launches::held());
    if let Some(hook) = place.and_then(|place| HOOKS.get(place)) {
        // SAFETY: as above.
        unsafe { address.write_unaligned(hook.ours()) };
    }
    code
}

/// Ask the driver for the address of a function.
fn ask(name: &CStr, address: &mut *mut c_void, version: i32, flags: u64) -> Code {
    type First = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> Code;
    type Second = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Code;
    if let Some(found) = HOOKS[At::cuGetProcAddress_v2 as usize].driver.get() {
        // SAFETY: the function has these arguments, by cuda.h.
        let function: Second = unsafe { core::mem::transmute(found) };
        let mut status = 0;
        // SAFETY: the pointers are valid.
        return unsafe { function(name.as_ptr(), address, version, flags, &mut status) };
    }
    let Some(found) = HOOKS[At::cuGetProcAddress as usize].driver.get() else {
        return NOT_FOUND;
    };
    // SAFETY: the function has these arguments, by cuda.h.
    let function: First = unsafe { core::mem::transmute(found) };
    // SAFETY: the pointers are valid.
    unsafe { function(name.as_ptr(), address, version, flags) }
}
