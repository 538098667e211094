//! Symbols for stream-ordered allocation.

use std::ffi::c_int;
use std::mem::offset_of;

use super::pointer::{In, Out, Untyped};
use super::symbols::symbols;
use super::vmm::{DESCRIPTOR, Location, MemAccess};
use crate::codes::{CuCode, INVALID_VALUE, NOT_SUPPORTED};
use crate::driver::SimulatedDriver;
use crate::memory::AllocationKind;
use crate::pool::PoolAttribute;
use crate::share::{Common, SharedMemory, Thing};
use crate::vmm::MemoryPlace;

/// `CUmemPoolProps`. Before CUDA 12.2 `max` was reserved, and zero.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PoolProperties {
    pub(super) kind: c_int,
    handle_types: c_int,
    pub(super) location: Location,
    win32: usize,
    max: u64,
    usage: u16,
    reserved: [u8; 54],
}

// The layout in cuda.h.
const _: () = assert!(
    size_of::<PoolProperties>() == 88 && offset_of!(PoolProperties, location) == 8 && offset_of!(PoolProperties, max) == 24
);

symbols! {
    call [cuMemAllocAsync, cuMemAllocAsync_ptsz](pointer: Out<u64>, bytes: u64, stream: usize) |driver| {
        pointer.present()?;
        let (device, capture) = (driver.stream(stream)?.device, driver.stream(stream)?.capture);
        if let Some(graph) = capture {
            return pointer.put(driver.add_allocation(graph, device, bytes)?.1);
        }
        let pool = driver.current_pool(device);
        pointer.put(driver.allocate_from_pool(pool, bytes)?)
    };

    call [cuMemAllocFromPoolAsync, cuMemAllocFromPoolAsync_ptsz](pointer: Out<u64>, bytes: u64, pool: usize, stream: usize) |driver| {
        pointer.present()?;
        let device = driver.pool(pool)?.device;
        if let Some(graph) = driver.stream(stream)?.capture {
            return pointer.put(driver.add_allocation(graph, device, bytes)?.1);
        }
        pointer.put(driver.allocate_from_pool(pool, bytes)?)
    };

    call [cuMemFreeAsync, cuMemFreeAsync_ptsz](pointer: u64, stream: usize) |driver| {
        if let Some(graph) = driver.stream(stream)?.capture {
            return driver.add_free(graph, pointer).map(drop);
        }
        match driver.memory.allocations.get(&pointer).map(|allocation| &allocation.kind) {
            Some(AllocationKind::Pool(_) | AllocationKind::Graph | AllocationKind::Borrowed) => driver.release(pointer),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuMemPoolCreate(pool: Out<usize>, properties: In<PoolProperties>) |driver| {
        pool.present()?;
        let properties = properties.get()?;
        if properties.kind == MANAGED && driver.version >= 13000 {
            let device = driver.device_of_managed(properties.location)?;
            return pool.put(driver.create_pool(device, 0, false));
        }
        if properties.kind != 1 {
            return Err(INVALID_VALUE);
        }
        match driver.place_of(properties.location.kind, properties.location.id)? {
            MemoryPlace::Device(device) => pool.put(driver.create_pool(device, properties.max, false)),
            // Pools of main memory take nothing of a GPU, and are not simulated.
            MemoryPlace::Host => Err(NOT_SUPPORTED),
        }
    };

    call cuMemPoolDestroy(pool: usize) |driver| driver.destroy_pool(pool);

    call cuMemPoolTrimTo(pool: usize, keep: u64) |driver| {
        driver.pool(pool)?;
        driver.shrink_pool(pool, keep)
    };

    call cuMemPoolSetAttribute(pool: usize, attribute: c_int, value: Untyped) |driver| {
        let pool = driver.pool(pool)?;
        if let Some(reuse) = pool.reuse(attribute) {
            *reuse = value.read::<c_int>()?;
            return Ok(());
        }
        pool.set(PoolAttribute::of(attribute).ok_or(INVALID_VALUE)?, value.read::<u64>()?)
    };

    call cuMemPoolGetAttribute(pool: usize, attribute: c_int, value: Untyped) |driver| {
        let pool = driver.pool(pool)?;
        if let Some(reuse) = pool.reuse(attribute) {
            return value.write::<c_int>(*reuse);
        }
        value.write::<u64>(pool.get(PoolAttribute::of(attribute).ok_or(INVALID_VALUE)?))
    };

    // Access is not simulated: each device has it.
    call cuMemPoolSetAccess(pool: usize, accesses: In<MemAccess>, count: u64) |driver| {
        driver.pool(pool)?;
        match count {
            0 => Err(INVALID_VALUE),
            _ => accesses.get().map(drop),
        }
    };

    call cuMemPoolGetAccess(flags: Out<c_int>, pool: usize, location: In<Location>) |driver| {
        driver.pool(pool)?;
        let Location { kind, id } = location.get()?;
        driver.place_of(kind, id)?;
        flags.put(3)
    };

    call cuDeviceGetDefaultMemPool(pool: Out<usize>, device: c_int) |driver| {
        pool.present()?;
        let device = driver.device(device)?;
        pool.put(driver.default_pool(device))
    };

    call cuDeviceGetMemPool(pool: Out<usize>, device: c_int) |driver| {
        pool.present()?;
        let device = driver.device(device)?;
        pool.put(driver.current_pool(device))
    };

    call cuMemGetDefaultMemPool(pool: Out<usize>, location: In<Location>, kind: c_int) |driver| {
        pool.present()?;
        let handle = pool_of(driver, location.get()?, kind, SimulatedDriver::default_pool)?;
        pool.put(handle)
    };

    call cuMemGetMemPool(pool: Out<usize>, location: In<Location>, kind: c_int) |driver| {
        pool.present()?;
        let handle = pool_of(driver, location.get()?, kind, SimulatedDriver::current_pool)?;
        pool.put(handle)
    };

    call cuDeviceSetMemPool(device: c_int, pool: usize) |driver| {
        let device = driver.device(device)?;
        let of = driver.pool(pool)?;
        if of.device != device || of.imported {
            return Err(INVALID_VALUE);
        }
        driver.devices[device].pool = Some(pool);
        Ok(())
    };

    call cuMemPoolExportToShareableHandle(descriptor: Out<c_int>, pool: usize, kind: c_int, flags: u64) |driver| {
        descriptor.present()?;
        let device = driver.pool(pool)?.device;
        match (kind, flags) {
            (DESCRIPTOR, 0) => descriptor.put(Common::begin(driver.share(Thing::Pool, device, 0))?.descriptor()?),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuMemPoolImportFromShareableHandle(pool: Out<usize>, descriptor: usize, kind: c_int, _flags: u64) |driver| {
        pool.present()?;
        if kind != DESCRIPTOR {
            return Err(INVALID_VALUE);
        }
        let shared = Common::of_descriptor(descriptor, Thing::Pool)?.shared();
        let device = driver.device_of(&shared)?;
        pool.put(driver.create_pool(device, 0, true))
    };

    call cuMemPoolExportPointer(data: Out<[u8; 64]>, pointer: u64) |driver| {
        let allocation = driver.memory.allocations.get(&pointer).ok_or(INVALID_VALUE)?;
        match allocation.kind {
            AllocationKind::Pool(_) => data.put(driver.share_memory(pointer)?.encode()),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuMemPoolImportPointer(pointer: Out<u64>, pool: usize, data: In<[u8; 64]>) |driver| {
        pointer.present()?;
        let shared = SharedMemory::decode(&data.get()?, Thing::Pointer)?;
        pointer.put(import(driver, pool, &shared)?)
    };
}

/// CU_MEM_ALLOCATION_TYPE_MANAGED.
const MANAGED: c_int = 2;

/// Return the default or the current pool of a place. A device has one of managed memory, too, which is never replaced.
fn pool_of(
    driver: &mut SimulatedDriver,
    location: Location,
    kind: c_int,
    of_device: fn(&mut SimulatedDriver, usize) -> usize,
) -> Result<usize, CuCode> {
    if kind == MANAGED {
        let device = driver.device_of_managed(location)?;
        return Ok(driver.default_managed_pool(device));
    }
    match driver.place_of(location.kind, location.id)? {
        MemoryPlace::Device(device) if kind == 1 => Ok(of_device(driver, device)),
        MemoryPlace::Device(_) => Err(INVALID_VALUE),
        MemoryPlace::Host => Err(NOT_SUPPORTED),
    }
}

/// Give a pointer of another process's pool an address.
fn import(driver: &mut SimulatedDriver, pool: usize, shared: &SharedMemory) -> Result<u64, CuCode> {
    let pool = driver.pool(pool)?;
    let device = pool.device;
    if !pool.imported || driver.device_of(shared)? != device {
        return Err(INVALID_VALUE);
    }
    driver.borrow(device, shared.bytes, Common::named(*shared)?)
}
