//! Symbols for linear, pitched, and managed memory.

use std::ffi::c_uint;

use super::pointer::Out;
use super::symbols::symbols;
use crate::codes::{INVALID_VALUE, NOT_FOUND, OUT_OF_MEMORY};
use crate::memory::rows;

symbols! {
    call cuMemGetInfo_v2(free: Out<u64>, total: Out<u64>) |driver| {
        let index = driver.current_device()?;
        let device = &mut driver.devices[index];
        let found = device.free()?;
        free.put_if_present(found);
        total.put_if_present(device.card.described.memory_mib << 20);
        Ok(())
    };

    // The symbol of CUDA 3.1 and before, which counts in 32 bits.
    call cuMemGetInfo(free: Out<c_uint>, total: Out<c_uint>) |driver| {
        let index = driver.current_device()?;
        let device = &mut driver.devices[index];
        let cut = |bytes: u64| c_uint::try_from(bytes).unwrap_or(c_uint::MAX);
        let found = device.free()?;
        free.put_if_present(cut(found));
        total.put_if_present(cut(device.card.described.memory_mib << 20));
        Ok(())
    };

    call cuMemAlloc_v2(pointer: Out<u64>, bytes: u64) |driver| {
        driver.current()?;
        pointer.present()?;
        pointer.put(driver.allocate(bytes)?)
    };

    // The symbol of CUDA 3.1 and before, which returns an address of 32 bits.
    call cuMemAlloc(pointer: Out<u32>, bytes: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        let address = driver.allocate_low(u64::from(bytes))?;
        pointer.put(u32::try_from(address).map_err(|_| OUT_OF_MEMORY)?)
    };

    call cuMemAllocPitch_v2(pointer: Out<u64>, pitch: Out<u64>, width: u64, height: u64, element: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        pitch.present()?;
        let (address, distance) = driver.allocate_pitch(width, height, element)?;
        pointer.put(address)?;
        pitch.put(distance)
    };

    // The symbol of CUDA 3.1 and before.
    call cuMemAllocPitch(pointer: Out<u32>, pitch: Out<c_uint>, width: c_uint, height: c_uint, element: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        pitch.present()?;
        let distance = rows(u64::from(width), u64::from(height), element)?;
        let address = driver.allocate_low(distance.saturating_mul(u64::from(height)))?;
        pointer.put(u32::try_from(address).map_err(|_| OUT_OF_MEMORY)?)?;
        pitch.put(c_uint::try_from(distance).map_err(|_| OUT_OF_MEMORY)?)
    };

    // CU_MEM_ATTACH_GLOBAL or CU_MEM_ATTACH_HOST.
    call cuMemAllocManaged(pointer: Out<u64>, bytes: u64, flags: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        if !matches!(flags, 1 | 2) {
            return Err(INVALID_VALUE);
        }
        pointer.put(driver.allocate_managed(bytes)?)
    };

    call cuMemFree_v2(pointer: u64) |driver| driver.free(pointer);

    // The symbol of CUDA 3.1 and before.
    call cuMemFree(pointer: u32) |driver| driver.free(u64::from(pointer));

    call cuMemGetAddressRange_v2(start: Out<u64>, length: Out<u64>, pointer: u64) |driver| {
        driver.current()?;
        let (address, allocation) = driver.memory.containing(pointer).ok_or(NOT_FOUND)?;
        start.put_if_present(address);
        length.put_if_present(allocation.bytes);
        Ok(())
    };
}
