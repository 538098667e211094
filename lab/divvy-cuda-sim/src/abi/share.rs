//! Symbols for memory of other processes, other APIs, and other contexts.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;

use super::pointer::{In, Out};
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_CONTEXT, INVALID_VALUE};
use crate::driver::SimulatedDriver;
use crate::memory::{AllocationKind, MemoryAllocation};
use crate::share::{Common, SharedMemory, Thing};

/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct IpcMemHandle([u8; 64]);

/// `CUDA_EXTERNAL_MEMORY_HANDLE_DESC`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct External {
    kind: c_int,
    handle: [usize; 2],
    bytes: u64,
    flags: c_uint,
    reserved: [c_uint; 16],
}

/// `CUDA_EXTERNAL_MEMORY_BUFFER_DESC`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct Buffer {
    offset: u64,
    bytes: u64,
    flags: c_uint,
    reserved: [c_uint; 16],
}

// The layout in cuda.h.
const _: () = assert!(size_of::<External>() == 104 && offset_of!(External, bytes) == 24 && size_of::<Buffer>() == 88);

symbols! {
    call cuIpcGetMemHandle(handle: Out<IpcMemHandle>, pointer: u64) |driver| {
        handle.present()?;
        let (start, allocation) = driver.memory.containing(pointer).ok_or(INVALID_VALUE)?;
        match allocation.kind {
            // A page with other memory ends with the process.
            AllocationKind::Small => handle.put(IpcMemHandle(driver.share(Thing::Pointer, allocation.device, allocation.bytes).encode())),
            AllocationKind::Pages(_) => handle.put(IpcMemHandle(driver.share_memory(start)?.encode())),
            _ => Err(INVALID_VALUE),
        }
    };

    call [cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2](pointer: Out<u64>, handle: IpcMemHandle, flags: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS is the only flag.
        if flags != 1 {
            return Err(INVALID_VALUE);
        }
        pointer.put(open(driver, handle)?)
    };

    call cuIpcCloseMemHandle(pointer: u64) |driver| {
        driver.current()?;
        match driver.memory.allocations.get_mut(&pointer) {
            Some(MemoryAllocation { kind: AllocationKind::Borrowed, common: Some(common), .. }) if common.opened > 1 => {
                common.opened -= 1;
                Ok(())
            }
            Some(MemoryAllocation { kind: AllocationKind::Borrowed, .. }) => driver.release(pointer),
            _ => Err(INVALID_VALUE),
        }
    };

    // The types of handles are 1 (a file descriptor) to 9.
    call cuImportExternalMemory(memory: Out<usize>, description: In<External>) |driver| {
        driver.current()?;
        memory.present()?;
        let description = description.get()?;
        if !(1..=9).contains(&description.kind) {
            return Err(INVALID_VALUE);
        }
        memory.put(driver.import_external(description.bytes)?)
    };

    call cuExternalMemoryGetMappedBuffer(pointer: Out<u64>, memory: usize, description: In<Buffer>) |driver| {
        pointer.present()?;
        let Buffer { offset, bytes, .. } = description.get()?;
        pointer.put(driver.map_external(memory, offset, bytes)?)
    };

    call cuDestroyExternalMemory(memory: usize) |driver| driver.destroy_external(memory);

    // Of a GPU's resources only the number of SMs is told: CU_DEV_RESOURCE_TYPE_SM.
    call cuDeviceGetDevResource(device: c_int, resource: Out<[c_uint; 36]>, kind: c_int) |driver| {
        resource.present()?;
        let device = driver.device(device)?;
        if kind != 1 {
            return Err(INVALID_VALUE);
        }
        let mut words = [0; 36];
        words[0] = 1;
        words[24] = driver.devices[device].card.described.sms;
        resource.put(words)
    };

    call cuDevResourceGenerateDesc(descriptor: Out<usize>, resources: In<[c_uint; 36]>, count: c_uint) |driver| {
        descriptor.present()?;
        if count == 0 || resources.get()?[0] != 1 {
            return Err(INVALID_VALUE);
        }
        let handle = driver.new_handle();
        driver.objects.descriptors.insert(handle, ());
        descriptor.put(handle)
    };

    // CU_GREEN_CTX_DEFAULT_STREAM is required.
    call cuGreenCtxCreate(context: Out<usize>, descriptor: usize, device: c_int, flags: c_uint) |driver| {
        context.present()?;
        let device = driver.device(device)?;
        if flags != 1 || !driver.objects.descriptors.contains_key(&descriptor) {
            return Err(INVALID_VALUE);
        }
        context.put(driver.create_green(device)?)
    };

    call cuGreenCtxDestroy(context: usize) |driver| driver.destroy_green(context);

    call cuCtxFromGreenCtx(context: Out<usize>, green: usize) |driver| {
        context.present()?;
        context.put(driver.context_of_green(green)?)
    };
}

/// Give memory of another process an address. A process cannot open its own.
fn open(driver: &mut SimulatedDriver, handle: IpcMemHandle) -> Result<u64, CuCode> {
    let shared = SharedMemory::decode(&handle.0, Thing::Pointer)?;
    if shared.pid == std::process::id() {
        return Err(INVALID_CONTEXT);
    }
    let device = driver.device_of(&shared)?;
    // "If the memory handle has already been opened by the current context, the reference count on the handle is incremented by 1 and the existing device pointer
    // is returned" (cuda.h, cuIpcOpenMemHandle).
    let known = driver.memory.allocations.iter_mut();
    let mut known = known.filter_map(|(address, allocation)| Some((*address, allocation.common.as_mut()?)));
    if let Some((address, common)) = known.find(|(_, common)| common.is(&shared)) {
        common.opened += 1;
        return Ok(address);
    }
    driver.borrow(device, shared.bytes, Common::named(shared)?)
}
