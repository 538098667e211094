//! Symbols for virtual memory management.

use std::ffi::c_int;

use super::pointer::{In, Out};
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_VALUE, NOT_SUPPORTED};
use crate::driver::SimulatedDriver;
use crate::share::{Common, Thing};
use crate::slab::PAGE;
use crate::vmm::MemoryPlace;

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
pub(super) const DESCRIPTOR: c_int = 1;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct MemAccess {
    location: Location,
    flags: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct AllocationProperties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: usize,
    flags: [u8; 8],
}

// The sizes in cuda.h.
const _: () = assert!(size_of::<Location>() == 8 && size_of::<MemAccess>() == 12 && size_of::<AllocationProperties>() == 32);

symbols! {
    call cuMemGetAllocationGranularity(granularity: Out<u64>, properties: In<AllocationProperties>, _option: c_int) |driver| {
        granularity.present()?;
        place(driver, properties)?;
        granularity.put(PAGE)
    };

    call cuMemCreate(handle: Out<u64>, bytes: u64, properties: In<AllocationProperties>, flags: u64) |driver| {
        handle.present()?;
        let place = place(driver, properties)?;
        match flags {
            0 => handle.put(driver.create_physical(place, bytes, None)? as u64),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuMemRelease(handle: u64) |driver| driver.release_physical(handle as usize);

    call cuMemRetainAllocationHandle(handle: Out<u64>, address: u64) |driver| {
        handle.present()?;
        handle.put(driver.retain_physical(address)? as u64)
    };

    call cuMemGetAllocationPropertiesFromHandle(properties: Out<AllocationProperties>, handle: u64) |driver| {
        let (place, _) = driver.vmm.of(handle as usize)?;
        properties.put(AllocationProperties {
            kind: 1,
            handle_types: 0,
            location: match place {
                MemoryPlace::Device(device) => Location { kind: 1, id: device as c_int },
                MemoryPlace::Host => Location { kind: 2, id: 0 },
            },
            win32: 0,
            flags: [0; 8],
        })
    };

    call cuMemAddressReserve(address: Out<u64>, bytes: u64, align: u64, _wish: u64, flags: u64) |driver| {
        address.present()?;
        match flags {
            0 => address.put(driver.reserve(bytes, align)?),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuMemAddressFree(address: u64, bytes: u64) |driver| driver.unreserve(address, bytes);

    call cuMemMap(address: u64, bytes: u64, offset: u64, handle: u64, flags: u64) |driver| match flags {
        0 => driver.map(address, bytes, offset, handle as usize),
        _ => Err(INVALID_VALUE),
    };

    call cuMemUnmap(address: u64, bytes: u64) |driver| driver.unmap(address, bytes);

    call cuMemSetAccess(address: u64, bytes: u64, accesses: In<MemAccess>, count: u64) |driver| {
        if count == 0 {
            return Err(INVALID_VALUE);
        }
        let access = accesses.get()?;
        driver.place_of(access.location.kind, access.location.id)?;
        // CU_MEM_ACCESS_FLAGS_PROT_NONE, PROT_READ, PROT_READWRITE.
        match access.flags {
            0 | 1 | 3 => driver.is_mapped(address, bytes),
            _ => Err(INVALID_VALUE),
        }
    };

    // Access is not simulated: what is mapped can be read and written.
    call cuMemGetAccess(flags: Out<u64>, location: In<Location>, address: u64) |driver| {
        let Location { kind, id } = location.get()?;
        driver.place_of(kind, id)?;
        driver.mapping(address).ok_or(INVALID_VALUE)?;
        flags.put(3)
    };

    call cuMemExportToShareableHandle(descriptor: Out<c_int>, handle: u64, kind: c_int, flags: u64) |driver| {
        descriptor.present()?;
        let (place, bytes) = driver.vmm.of(handle as usize)?;
        match (place, kind, flags) {
            (MemoryPlace::Device(device), DESCRIPTOR, 0) => {
                let shared = driver.share(Thing::Physical, device, bytes);
                let physical = driver.vmm.known(handle as usize)?;
                let common = physical.common.take().map_or_else(|| Common::begin(shared), Ok)?;
                descriptor.put(physical.common.insert(common).descriptor()?)
            }
            (_, DESCRIPTOR, 0) => Err(NOT_SUPPORTED),
            _ => Err(INVALID_VALUE),
        }
    };

    call cuMemImportFromShareableHandle(handle: Out<u64>, descriptor: usize, kind: c_int) |driver| {
        handle.present()?;
        if kind != DESCRIPTOR {
            return Err(INVALID_VALUE);
        }
        let common = Common::of_descriptor(descriptor, Thing::Physical)?;
        let shared = common.shared();
        let place = MemoryPlace::Device(driver.device_of(&shared)?);
        handle.put(driver.create_physical(place, shared.bytes, Some(common))? as u64)
    };
}

/// Return the place of the memory that is described. CU_MEM_ALLOCATION_TYPE_PINNED is the only kind of it.
fn place(driver: &SimulatedDriver, properties: In<AllocationProperties>) -> Result<MemoryPlace, CuCode> {
    let properties = properties.get()?;
    match properties.kind {
        1 => driver.place_of(properties.location.kind, properties.location.id),
        _ => Err(INVALID_VALUE),
    }
}
