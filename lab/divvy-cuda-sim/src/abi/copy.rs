//! Symbols that use memory: main memory, copies, fills, and questions about pointers. Memory of the GPU has no contents here: copies and fills check
//! their arguments, and what is copied to main memory is zero.

use std::ffi::{c_int, c_uint};

use super::pointer::{Bytes, Out, Untyped};
use super::symbols::symbols;
use crate::codes::{Code, INVALID_VALUE};
use crate::driver::Driver;
use crate::memory::Kind;

symbols! {
    call cuMemAllocHost_v2(pointer: Out<u64>, bytes: u64) |driver| {
        driver.current()?;
        pointer.present()?;
        pointer.put(driver.allocate_host(bytes)?)
    };

    // The symbol of CUDA 3.1 and before.
    call cuMemAllocHost(pointer: Out<u64>, bytes: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        pointer.put(driver.allocate_host(u64::from(bytes))?)
    };

    call cuMemHostAlloc(pointer: Out<u64>, bytes: u64, _flags: c_uint) |driver| {
        driver.current()?;
        pointer.present()?;
        pointer.put(driver.allocate_host(bytes)?)
    };

    call cuMemFreeHost(pointer: u64) |driver| driver.free_host(pointer);

    call cuMemHostGetDevicePointer_v2(pointer: Out<u64>, host: u64, flags: c_uint) |driver| {
        driver.current()?;
        let known = driver.memory.containing(host).is_some_and(|(_, allocation)| matches!(allocation.kind, Kind::Host(_)));
        match known && flags == 0 {
            true => pointer.put(host),
            false => Err(INVALID_VALUE),
        }
    };

    call [cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds](to: u64, from: Bytes, bytes: u64) |driver| {
        from.present(bytes)?;
        inside(driver, to, bytes)
    };

    call [cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz](to: u64, from: Bytes, bytes: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        from.present(bytes)?;
        inside(driver, to, bytes)
    };

    call [cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds](to: Bytes, from: u64, bytes: u64) |driver| {
        inside(driver, from, bytes)?;
        to.clear(bytes)
    };

    call [cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz](to: Bytes, from: u64, bytes: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        inside(driver, from, bytes)?;
        to.clear(bytes)
    };

    call [cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds](to: u64, from: u64, bytes: u64) |driver| {
        inside(driver, from, bytes)?;
        inside(driver, to, bytes)
    };

    call [cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz](to: u64, from: u64, bytes: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        inside(driver, from, bytes)?;
        inside(driver, to, bytes)
    };

    call [cuMemsetD8_v2, cuMemsetD8_v2_ptds](to: u64, _value: u8, count: u64) |driver| inside(driver, to, count);

    call [cuMemsetD8Async, cuMemsetD8Async_ptsz](to: u64, _value: u8, count: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        inside(driver, to, count)
    };

    call [cuMemsetD32_v2, cuMemsetD32_v2_ptds](to: u64, _value: c_uint, count: u64) |driver| {
        inside(driver, to, count.checked_mul(4).ok_or(INVALID_VALUE)?)
    };

    call [cuMemsetD32Async, cuMemsetD32Async_ptsz](to: u64, _value: c_uint, count: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        inside(driver, to, count.checked_mul(4).ok_or(INVALID_VALUE)?)
    };

    // The attributes (`CUpointer_attribute`) that frameworks ask for.
    call cuPointerGetAttribute(value: Untyped, attribute: c_int, pointer: u64) |driver| {
        let (start, allocation) = driver.memory.containing(pointer).ok_or(INVALID_VALUE)?;
        let host = matches!(allocation.kind, Kind::Host(_));
        let managed = matches!(allocation.kind, Kind::Managed(..));
        match attribute {
            // CONTEXT
            1 => value.write::<u64>(allocation.context.unwrap_or(0) as u64),
            // MEMORY_TYPE: CU_MEMORYTYPE_HOST or CU_MEMORYTYPE_DEVICE
            2 => value.write::<c_uint>(if host { 1 } else { 2 }),
            // DEVICE_POINTER
            3 => value.write::<u64>(pointer),
            // HOST_POINTER
            4 if host || managed => value.write::<u64>(pointer),
            // IS_MANAGED
            8 => value.write::<u8>(u8::from(managed)),
            // DEVICE_ORDINAL
            9 => value.write::<c_int>(allocation.device as c_int),
            // RANGE_START_ADDR, RANGE_SIZE
            11 => value.write::<u64>(start),
            12 => value.write::<u64>(allocation.bytes),
            _ => Err(INVALID_VALUE),
        }
    };
}

/// Check that a range is inside an allocation or a mapping.
fn inside(driver: &Driver, address: u64, bytes: u64) -> Result<(), Code> {
    driver.current()?;
    if bytes == 0 {
        return Ok(());
    }
    let end = address.checked_add(bytes).ok_or(INVALID_VALUE)?;
    let allocated = driver
        .memory
        .containing(address)
        .map(|(start, allocation)| start + allocation.bytes);
    let mapped = driver.mapping(address).map(|(start, length)| start + length);
    match allocated.or(mapped).is_some_and(|limit| end <= limit) {
        true => Ok(()),
        false => Err(INVALID_VALUE),
    }
}
