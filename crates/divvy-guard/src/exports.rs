//! The functions that the guard has in place of the driver's. All other names the loader finds in the real library.

use core::ffi::{CStr, c_char, c_int, c_void};
use core::ptr::null_mut;
use core::sync::atomic::Ordering;

use crate::arrays::{Deep, Flat};
use crate::contexts;
use crate::cuda::{
    AllocationHandle, AllocationNode, AllocationProp, CuContext, CuDevice, CuResult, DriverCall, ExternalMemory, GraphNodePrefix,
    IpcHandle, LaunchParameters, MemLocation, NOT_FOUND, OutPointer, Pointer, SUCCESS, Uint,
};
use crate::hook::{LONGEST, find};
use crate::{arrays, driver, external, launches, linear, mappings, pools, view};

macro_rules! out {
    ($pointer:ident) => {
        // SAFETY: the driver gets the same pointer, and the rules read from it only after the driver succeeded.
        unsafe { OutPointer::new($pointer) }
    };
}

macro_rules! shape {
    ($pointer:ident) => {
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { $pointer.as_ref() }.copied().map(Into::into)
    };
}

hooks! {
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

    // Contexts.
    fn cuDevicePrimaryCtxRetain(context: *mut CuContext, device: CuDevice) 7000: |call|
        contexts::retain(device, call);
    fn cuCtxCreate(context: *mut CuContext, flags: Uint, device: CuDevice) 2000: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxCreate_v2(context: *mut CuContext, flags: Uint, device: CuDevice) 3020: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxCreate_v3(context: *mut CuContext, affinity: *mut c_void, count: c_int, flags: Uint, device: CuDevice) 11040: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxCreate_v4(context: *mut CuContext, parameters: *mut c_void, flags: Uint, device: CuDevice) 12050: |call|
        contexts::create(device, call, out!(context));
    fn cuCtxDestroy(context: CuContext) 2000: |call| contexts::destroy(context.addr() as u64, call);
    fn cuCtxDestroy_v2(context: CuContext) 4000: |call| contexts::destroy(context.addr() as u64, call);

    fn cuCtxSetLimit(which: c_int, value: usize) 3010: |call| contexts::limit(which, value as u64, call);
    fn cuGreenCtxCreate(context: *mut CuContext, resources: *mut c_void, device: CuDevice, flags: Uint) 12040: |call|
        contexts::create_green(device, call, out!(context));
    fn cuGreenCtxDestroy(context: CuContext) 12040: |call| contexts::destroy_green(context.addr() as u64, call);

    // Physical memory and its mappings.
    fn cuMemCreate(handle: *mut AllocationHandle, bytes: usize, prop: *const AllocationProp, flags: u64) 10020: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        { let made = out!(handle); unsafe { mappings::create(bytes as u64, prop, call, made) } };
    fn cuMemRelease(handle: AllocationHandle) 10020: |call| mappings::release(handle, call);
    fn cuMemMap(pointer: Pointer, size: usize, offset: usize, handle: AllocationHandle, flags: u64) 10020: |call|
        mappings::map(pointer, size as u64, handle, call);
    fn cuMemUnmap(pointer: Pointer, size: usize) 10020: |call| mappings::unmap(pointer, size as u64, call);
    fn cuMemExportToShareableHandle(exported: *mut c_void, handle: AllocationHandle, kind: c_int, flags: u64) 10020: |call|
        mappings::export(handle, call);

    // Pools. The functions with the suffix are those for programs whose default stream is the thread's own.
    fn cuMemAllocAsync(pointer: *mut Pointer, bytes: usize, stream: u64) 11020: |call|
        pools::allocate(bytes as u64, stream, call);
    fn cuMemAllocAsync_ptsz(pointer: *mut Pointer, bytes: usize, stream: u64) 11020: |call|
        pools::allocate(bytes as u64, stream, call);
    fn cuMemAllocFromPoolAsync(pointer: *mut Pointer, bytes: usize, pool: u64, stream: u64) 11020: |call|
        pools::allocate_from(pool, bytes as u64, call);
    fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut Pointer, bytes: usize, pool: u64, stream: u64) 11020: |call|
        pools::allocate_from(pool, bytes as u64, call);
    fn cuMemPoolCreate(pool: *mut u64, prop: *const AllocationProp) 11020: |call| {
        let made = out!(pool);
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::create(prop, call, made) }
    };
    fn cuMemPoolExportToShareableHandle(exported: *mut c_void, pool: u64, kind: c_int, flags: u64) 11020: |call|
        pools::export(pool, call);
    fn cuMemFreeAsync(pointer: Pointer, stream: u64) 11020: |call| external::close(pointer, call);
    fn cuMemFreeAsync_ptsz(pointer: Pointer, stream: u64) 11020: |call| external::close(pointer, call);
    fn cuMemPoolDestroy(pool: u64) 11020: |call| pools::destroy(pool, call);

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
    fn cuGraphAddNode(node: *mut u64, graph: u64, from: *const u64, count: usize, parameters: *mut GraphNodePrefix) 12020: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::add_any_node(parameters, call) };
    fn cuGraphAddNode_v2(node: *mut u64, graph: u64, from: *const u64, edges: *const c_void, count: usize, parameters: *mut GraphNodePrefix) 12030: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::add_any_node(parameters, call) };
    fn cuGraphAddNode_v3(node: *mut u64, graph: u64, from: *const u64, edges: *const c_void, count: usize, parameters: *mut GraphNodePrefix) 13040: |call|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { pools::add_any_node(parameters, call) };
    fn cuGraphLaunch(graph: u64, stream: u64) 10000: |call| launch_graph(call);
    fn cuGraphLaunch_ptsz(graph: u64, stream: u64) 10000: |call| launch_graph(call);

    // Imports.
    fn cuIpcCloseMemHandle(pointer: Pointer) 4010: |call| external::close(pointer, call);
    fn cuImportExternalMemory(memory: *mut u64, description: *const ExternalMemory) 10000: |call| {
        let made = out!(memory);
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        unsafe { external::import(description, call, made) }
    };
    fn cuDestroyExternalMemory(memory: u64) 10000: |call| external::destroy(memory, call);

    afterwards:
    fn cuGetProcAddress(name: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64) 11030: |code|
        instead(name, address, code);

    // The view.
    fn cuMemGetInfo(free: *mut Uint, total: *mut Uint) 2000: |code|
        // SAFETY: the driver gets the same pointers.
        unsafe { view::memory(free, total, code) };
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) 3020: |code|
        // SAFETY: the driver gets the same pointers.
        unsafe { view::memory(free, total, code) };
    fn cuDeviceTotalMem(bytes: *mut Uint, device: CuDevice) 2000: |code|
        // SAFETY: the driver gets the same pointer.
        unsafe { view::total(bytes, device, code) };
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CuDevice) 3020: |code|
        // SAFETY: the driver gets the same pointer.
        unsafe { view::total(bytes, device, code) };

    // Contexts, memory, and pools.
    fn cuDevicePrimaryCtxRelease(device: CuDevice) 7000: |code| contexts::release(device, code);
    fn cuDevicePrimaryCtxRelease_v2(device: CuDevice) 11000: |code| contexts::release(device, code);
    fn cuDevicePrimaryCtxReset(device: CuDevice) 7000: |code| contexts::release(device, code);
    fn cuDevicePrimaryCtxReset_v2(device: CuDevice) 11000: |code| contexts::release(device, code);
    fn cuMemRetainAllocationHandle(handle: *mut AllocationHandle, address: *mut c_void) 11000: |code|
        mappings::retain(code, out!(handle));
    fn cuMemImportFromShareableHandle(handle: *mut AllocationHandle, exported: *mut c_void, kind: c_int) 10020: |code|
        mappings::import(code, out!(handle));
    fn cuMemGetDefaultMemPool(pool: *mut u64, location: *const MemLocation, kind: c_int) 13000: |code|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        { let known = out!(pool); unsafe { pools::get(location, kind, code, known) } };
    fn cuMemGetMemPool(pool: *mut u64, location: *const MemLocation, kind: c_int) 13000: |code|
        // SAFETY: the driver gets the same pointer, and demands that it is null or valid.
        { let known = out!(pool); unsafe { pools::get(location, kind, code, known) } };
    fn cuMemPoolTrimTo(pool: u64, keep: usize) 11020: |code| pools::change(pool, code);
    fn cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: *mut c_void) 11020: |code|
        pools::change(pool, code);
    fn cuCtxSynchronize() 2000: |code| pools::synchronize(code);
    fn cuCtxSynchronize_v2(context: CuContext) 13000: |code| pools::synchronize(code);
    fn cuStreamSynchronize(stream: u64) 2000: |code| pools::synchronize(code);
    fn cuStreamSynchronize_ptsz(stream: u64) 7000: |code| pools::synchronize(code);
    fn cuEventSynchronize(event: u64) 2000: |code| pools::synchronize(code);
    fn cuGraphUpload(graph: u64, stream: u64) 11010: |code| pools::synchronize(code);
    fn cuGraphUpload_ptsz(graph: u64, stream: u64) 11010: |code| pools::synchronize(code);
    fn cuGraphExecDestroy(graph: u64) 10000: |code| pools::synchronize(code);
    fn cuDeviceGraphMemTrim(device: CuDevice) 11040: |code| pools::synchronize(code);

    // Memory of other processes.
    fn cuIpcOpenMemHandle(pointer: *mut Pointer, handle: IpcHandle, flags: Uint) 4010: |code|
        external::open(code, out!(pointer), driver::close);
    fn cuIpcOpenMemHandle_v2(pointer: *mut Pointer, handle: IpcHandle, flags: Uint) 11000: |code|
        external::open(code, out!(pointer), driver::close);
    fn cuMemPoolImportPointer(pointer: *mut Pointer, pool: u64, exported: *mut c_void) 11020: |code|
        external::open(code, out!(pointer), driver::free);

    always:
    fn cuGetProcAddress_v2(name: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64,
        status: *mut c_int) 12000: {
        // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for.
        let code = unsafe { ask(name, address, version, flags, status) };
        instead(name, address, code)
    };

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
    fn cuLaunchCooperativeKernelMultiDevice(launches: *mut LaunchParameters, count: Uint, flags: Uint) 9000: || unsafe { launches::on_each(launches, count) };
    // The functions before CUDA 4.
    fn cuLaunch(function: u64) 2000: launches::on_current;
    fn cuLaunchGrid(function: u64, width: c_int, height: c_int) 2000: launches::on_current;
    fn cuLaunchGridAsync(function: u64, width: c_int, height: c_int, stream: u64) 2000: launches::on_current;
}

/// A launch of a graph may take memory, and it takes compute time.
fn launch_graph(call: &DriverCall) -> CuResult {
    launches::graph();
    pools::synchronize(call.run())
}

/// Give the program the guard's function, if the driver gave it exactly one that the guard replaces.
fn instead(name: *const c_char, address: *mut *mut c_void, code: CuResult) -> CuResult {
    if code != SUCCESS || address.is_null() || name.is_null() {
        return code;
    }
    // SAFETY: the driver succeeded with this pointer. A program may have given an unaligned one.
    let found = unsafe { address.read_unaligned() };
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
    let ask = |name: &CStr, address: &mut *mut c_void, version, flags| {
        // SAFETY: the pointers are valid, and a status is not wanted.
        unsafe { ask(name.as_ptr(), address, version, flags, null_mut()) }
    };
    let place = find(&HOOKS, NAMES, &BASES, name, found, ask).filter(|place| *place < LAUNCHES || launches::held());
    if let Some(hook) = place.and_then(|place| HOOKS.get(place)) {
        // SAFETY: as above.
        unsafe { address.write_unaligned(hook.ours()) };
    }
    code
}

/// Ask the driver for the address of a function. A driver before 525 has only the first version of the question. CUDA's runtime library 12 takes a driver that answers
/// nothing for no driver at all.
///
/// # Safety
/// The arguments are as the driver wants them. The status may also be null.
unsafe fn ask(name: *const c_char, address: *mut *mut c_void, version: c_int, flags: u64, status: *mut c_int) -> CuResult {
    type First = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64) -> CuResult;
    type Second = unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> CuResult;
    /// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
    const MISSING: c_int = 1;
    if let Some(found) = real(At::cuGetProcAddress_v2) {
        // SAFETY: the function has these arguments, by cuda.h.
        let function: Second = unsafe { core::mem::transmute(found) };
        // SAFETY: the caller's promise.
        return unsafe { function(name, address, version, flags, status) };
    }
    let code = if let Some(found) = real(At::cuGetProcAddress) {
        // SAFETY: the function has these arguments, by cuda.h.
        let function: First = unsafe { core::mem::transmute(found) };
        // SAFETY: the caller's promise.
        unsafe { function(name, address, version, flags) }
    } else {
        NOT_FOUND
    };
    if !status.is_null() {
        // SAFETY: the caller's promise.
        unsafe { status.write_unaligned(if code == SUCCESS { 0 } else { MISSING }) };
    }
    code
}
