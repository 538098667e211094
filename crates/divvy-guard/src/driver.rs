//! The functions of the real library.

use core::ffi::c_int;
use core::ptr::null_mut;

pub(crate) use divvy_shadow::RealFunction;

use crate::cuda::{AllocationProp, CuContext, CuDevice, CuResult, MemLocation, NOT_FOUND, SUCCESS, Uuid};

/// Call a function of the real library that the guard does not replace. It is `NOT_FOUND` when this driver does not have it.
macro_rules! ask {
    ($name:ident($($argument:expr => $type:ty),*)) => {{
        static FUNCTION: RealFunction = RealFunction::new();
        match FUNCTION.get(divvy_shadow::c_name!($name)) {
            Some(found) => {
                // SAFETY: the driver's function of this name has these arguments, by cuda.h.
                let function: unsafe extern "C" fn($($type),*) -> CuResult = unsafe { core::mem::transmute(found) };
                // SAFETY: every pointer among the arguments is a reference to a local variable of the right type.
                unsafe { function($($argument),*) }
            }
            None => NOT_FOUND,
        }
    }};
}

/// How many GPUs this process sees. The driver does not know it before `cuInit`, and it stays the same afterwards.
pub(crate) fn gpus() -> Option<u32> {
    let mut count: c_int = 0;
    (ask!(cuDeviceGetCount(&mut count => &mut c_int)) == SUCCESS).then_some(count.unsigned_abs())
}

/// The GPU of the thread's current context.
pub(crate) fn device() -> Option<CuDevice> {
    let mut device: CuDevice = 0;
    (ask!(cuCtxGetDevice(&mut device => &mut CuDevice)) == SUCCESS).then_some(device)
}

/// The current context of the thread.
pub(crate) fn context() -> Option<u64> {
    let mut context: CuContext = null_mut();
    let known = ask!(cuCtxGetCurrent(&mut context => &mut CuContext)) == SUCCESS && !context.is_null();
    known.then(|| context.addr() as u64)
}

/// The UUID of a GPU. For a part of a GPU (MIG) it is that of the whole: `cuDeviceGetUuid_v2` would tell the part.
pub(crate) fn uuid(device: CuDevice) -> Option<Uuid> {
    let mut uuid = Uuid::default();
    (ask!(cuDeviceGetUuid(&mut uuid => &mut Uuid, device => CuDevice)) == SUCCESS).then_some(uuid)
}

/// Whether the primary context of a GPU exists.
pub(crate) fn primary_exists(device: CuDevice) -> Option<bool> {
    let (mut flags, mut active): (u32, c_int) = (0, 0);
    let code = ask!(cuDevicePrimaryCtxGetState(device => CuDevice, &mut flags => &mut u32, &mut active => &mut c_int));
    (code == SUCCESS).then_some(active != 0)
}

/// Free linear memory.
pub(crate) fn free(pointer: u64) -> CuResult {
    ask!(cuMemFree_v2(pointer => u64))
}

/// Close memory of another process.
pub(crate) fn close(pointer: u64) -> CuResult {
    ask!(cuIpcCloseMemHandle(pointer => u64))
}

/// How many bytes the allocation at an address has.
pub(crate) fn bytes_at(pointer: u64) -> Option<u64> {
    let (mut start, mut bytes): (u64, u64) = (0, 0);
    let code = ask!(cuMemGetAddressRange_v2(&mut start => &mut u64, &mut bytes => &mut u64, pointer => u64));
    (code == SUCCESS).then_some(bytes)
}

/// The GPU that has the memory at an address.
pub(crate) fn device_of_pointer(pointer: u64) -> Option<CuDevice> {
    /// `CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL`.
    const ORDINAL: c_int = 9;
    let mut device: CuDevice = 0;
    let code = ask!(cuPointerGetAttribute(&mut device => &mut CuDevice, ORDINAL => c_int, pointer => u64));
    (code == SUCCESS).then_some(device)
}

/// Where physical memory is.
pub(crate) fn location_of(handle: u64) -> Option<MemLocation> {
    // With room for what later versions add.
    let mut prop = [AllocationProp::default(); 8];
    let code = ask!(cuMemGetAllocationPropertiesFromHandle(&mut prop => &mut [AllocationProp; 8], handle => u64));
    prop.first().filter(|_| code == SUCCESS).map(|prop| prop.location)
}

/// A limit of the current context (`CUlimit`).
pub(crate) fn limit(which: c_int) -> Option<u64> {
    let mut value: u64 = 0;
    (ask!(cuCtxGetLimit(&mut value => &mut u64, which => c_int)) == SUCCESS).then_some(value)
}

/// How many threads can run on a GPU at the same time.
pub(crate) fn threads(device: CuDevice) -> u64 {
    /// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`, `CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR`.
    const COUNTS: [c_int; 2] = [16, 39];
    COUNTS.iter().fold(1, |product, which| {
        let mut count: c_int = 0;
        ask!(cuDeviceGetAttribute(&mut count => &mut c_int, *which => c_int, device => CuDevice));
        u64::from(count.unsigned_abs()).max(1).saturating_mul(product)
    })
}

/// The context of a stream; `None` for the streams that every context has.
pub(crate) fn context_of_stream(stream: u64) -> Option<u64> {
    /// `CU_STREAM_PER_THREAD`; below it are `CU_STREAM_LEGACY` and the null stream.
    const PER_THREAD: u64 = 2;
    let mut context: u64 = 0;
    let known = stream > PER_THREAD && ask!(cuStreamGetCtx(stream => u64, &mut context => &mut u64)) == SUCCESS;
    known.then_some(context)
}

/// The GPU of a context, which is made current for the question.
pub(crate) fn device_of_context(mut context: u64) -> Option<CuDevice> {
    if ask!(cuCtxPushCurrent_v2(context => u64)) != SUCCESS {
        return None;
    }
    let device = device();
    ask!(cuCtxPopCurrent_v2(&mut context => &mut u64));
    device
}

/// The pool from which a GPU allocates.
pub(crate) fn pool_of(device: CuDevice) -> Option<u64> {
    let mut pool: u64 = 0;
    (ask!(cuDeviceGetMemPool(&mut pool => &mut u64, device => CuDevice)) == SUCCESS).then_some(pool)
}

/// The pool that a GPU has from the start.
pub(crate) fn default_pool_of(device: CuDevice) -> Option<u64> {
    let mut pool: u64 = 0;
    (ask!(cuDeviceGetDefaultMemPool(&mut pool => &mut u64, device => CuDevice)) == SUCCESS).then_some(pool)
}

/// Attributes of a pool (`CUmemPool_attribute`) that are numbers of bytes.
pub(crate) enum PoolBytes {
    /// `CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT`.
    Reserved = 5,
    /// `CU_MEMPOOL_ATTR_USED_MEM_CURRENT`.
    Used = 7,
}

/// What a pool has from the GPU, or programs have from it.
pub(crate) fn pool_bytes(pool: u64, which: PoolBytes) -> Option<u64> {
    let mut bytes: u64 = 0;
    let code = ask!(cuMemPoolGetAttribute(pool => u64, which as c_int => c_int, &mut bytes => &mut u64));
    (code == SUCCESS).then_some(bytes)
}

/// What graphs have reserved of a GPU.
pub(crate) fn graph_bytes(device: CuDevice) -> Option<u64> {
    /// `CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT`.
    const RESERVED: c_int = 2;
    let mut bytes: u64 = 0;
    let code = ask!(cuDeviceGetGraphMemAttribute(device => CuDevice, RESERVED => c_int, &mut bytes => &mut u64));
    (code == SUCCESS).then_some(bytes)
}
