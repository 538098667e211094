//! Symbols that use memory: main memory, copies, fills, and questions about pointers. A copy is done when its call returns.

use std::ffi::{c_int, c_uint};

use super::pointer::{HostBytes, Out, Untyped};
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_VALUE, OUT_OF_MEMORY};
use crate::driver::SimulatedDriver;
use crate::memory::AllocationKind;
use crate::trace;

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
        let known = driver.memory.containing(host).is_some_and(|(_, allocation)| matches!(allocation.kind, AllocationKind::Host(_)));
        if known && flags == 0 { pointer.put(host) } else { Err(INVALID_VALUE) }
    };

    wait [cuMemcpyHtoD_v2, cuMemcpyHtoD_v2_ptds](to: u64, from: HostBytes, bytes: u64) |driver| {
        upload(driver, "cuMemcpyHtoD", to, from, bytes)?;
        before(driver)
    };

    call [cuMemcpyHtoDAsync_v2, cuMemcpyHtoDAsync_v2_ptsz](to: u64, from: HostBytes, bytes: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        upload(driver, "cuMemcpyHtoDAsync", to, from, bytes)
    };

    wait [cuMemcpyDtoH_v2, cuMemcpyDtoH_v2_ptds](to: HostBytes, from: u64, bytes: u64) |driver| {
        download(driver, to, from, bytes)?;
        before(driver)
    };

    call [cuMemcpyDtoHAsync_v2, cuMemcpyDtoHAsync_v2_ptsz](to: HostBytes, from: u64, bytes: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        download(driver, to, from, bytes)
    };

    call [cuMemcpyDtoD_v2, cuMemcpyDtoD_v2_ptds](to: u64, from: u64, bytes: u64) |driver| {
        copy(driver, "cuMemcpyDtoD", to, from, bytes)
    };

    call [cuMemcpyDtoDAsync_v2, cuMemcpyDtoDAsync_v2_ptsz](to: u64, from: u64, bytes: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        copy(driver, "cuMemcpyDtoDAsync", to, from, bytes)
    };

    call [cuMemsetD8_v2, cuMemsetD8_v2_ptds](to: u64, value: u8, count: u64) |driver| fill(driver, to, [value], count);

    call [cuMemsetD8Async, cuMemsetD8Async_ptsz](to: u64, value: u8, count: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        fill(driver, to, [value], count)
    };

    call [cuMemsetD32_v2, cuMemsetD32_v2_ptds](to: u64, value: c_uint, count: u64) |driver| {
        fill(driver, to, value.to_ne_bytes(), count)
    };

    call [cuMemsetD32Async, cuMemsetD32Async_ptsz](to: u64, value: c_uint, count: u64, stream: usize) |driver| {
        driver.stream(stream)?;
        fill(driver, to, value.to_ne_bytes(), count)
    };

    // The attributes (`CUpointer_attribute`) that frameworks ask for.
    call cuPointerGetAttribute(value: Untyped, attribute: c_int, pointer: u64) |driver| {
        let (start, allocation) = driver.memory.containing(pointer).ok_or(INVALID_VALUE)?;
        let host = matches!(allocation.kind, AllocationKind::Host(_));
        let managed = matches!(allocation.kind, AllocationKind::Managed(..));
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

/// Return when the work ends that a copy waits for which is in no stream.
fn before(driver: &mut SimulatedDriver) -> Result<u64, CuCode> {
    Ok(driver.stream(0)?.ends)
}

/// Copy from main memory. `name` is the function without its version, for a test that wants a wrong byte.
fn upload(driver: &mut SimulatedDriver, name: &str, to: u64, from: HostBytes, bytes: u64) -> Result<(), CuCode> {
    from.present(bytes)?;
    inside(driver, to, bytes)?;
    if bytes > 0 {
        let place = driver.writable(to, bytes).ok_or(OUT_OF_MEMORY)?;
        // SAFETY: there is this much memory.
        unsafe { from.copy(place, bytes) }?;
    }
    corrupt(driver, name, to);
    Ok(())
}

/// Copy to main memory.
fn download(driver: &mut SimulatedDriver, to: HostBytes, from: u64, bytes: u64) -> Result<(), CuCode> {
    inside(driver, from, bytes)?;
    let place = driver.readable(from, bytes);
    // SAFETY: there is this much memory, or it was never written.
    unsafe { to.fill(place, bytes) }
}

/// Copy within the memory of GPUs.
fn copy(driver: &mut SimulatedDriver, name: &str, to: u64, from: u64, bytes: u64) -> Result<(), CuCode> {
    inside(driver, from, bytes)?;
    inside(driver, to, bytes)?;
    let written = |driver: &mut SimulatedDriver| driver.writable(to, bytes).ok_or(OUT_OF_MEMORY);
    match driver.readable(from, bytes) {
        _ if bytes == 0 => {}
        // SAFETY: both have this length. The contents of the source do not move if those of another allocation are made.
        Some(source) => unsafe { source.copy_to(written(driver)?, bytes as usize) },
        None => fill(driver, to, [0], bytes)?,
    }
    corrupt(driver, name, to);
    Ok(())
}

/// Repeat a value.
fn fill<const N: usize>(driver: &mut SimulatedDriver, to: u64, value: [u8; N], count: u64) -> Result<(), CuCode> {
    let bytes = count.checked_mul(N as u64).ok_or(INVALID_VALUE)?;
    inside(driver, to, bytes)?;
    if !to.is_multiple_of(N as u64) {
        return Err(INVALID_VALUE);
    }
    // Memory that was never written is zero already, and a test may clear more of it than the machine has.
    if count == 0 || value == [0; N] && driver.readable(to, bytes).is_none() {
        return Ok(());
    }
    let place = driver.writable(to, bytes).ok_or(OUT_OF_MEMORY)?;
    // SAFETY: there is this much memory, and nothing else uses it during this call.
    let place = unsafe { std::slice::from_raw_parts_mut(place.as_ptr(), bytes as usize) };
    place.as_chunks_mut::<N>().0.fill(value);
    Ok(())
}

/// Invert a byte of what a copy has written, if a test says so.
fn corrupt(driver: &mut SimulatedDriver, name: &str, to: u64) {
    if let Some((_, offset)) = trace::wrong(name) {
        driver.corrupt(to.saturating_add(offset));
    }
}

/// Check that a range is inside an allocation or a mapping.
fn inside(driver: &SimulatedDriver, address: u64, bytes: u64) -> Result<(), CuCode> {
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
    if allocated.or(mapped).is_some_and(|limit| end <= limit) {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}
