//! Symbols for contexts.

use std::ffi::{c_int, c_uint};

use super::pointer::{In, Out};
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_VALUE, UNSUPPORTED_LIMIT};
use crate::context::{pop, push, set, top};
use crate::driver::SimulatedDriver;

symbols! {
    call cuDevicePrimaryCtxRetain(context: Out<usize>, device: c_int) |driver| {
        context.present()?;
        let index = driver.device(device)?;
        context.put(driver.retain_primary(index)?)
    };

    call [cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2](device: c_int) |driver| {
        let index = driver.device(device)?;
        driver.release_primary(index)
    };

    call [cuDevicePrimaryCtxReset, cuDevicePrimaryCtxReset_v2](device: c_int) |driver| {
        let index = driver.device(device)?;
        driver.reset_primary(index)
    };

    call cuDevicePrimaryCtxSetFlags(device: c_int, flags: c_uint) |driver| {
        let index = driver.device(device)?;
        driver.set_primary_flags(index, flags, false)
    };

    call cuDevicePrimaryCtxSetFlags_v2(device: c_int, flags: c_uint) |driver| {
        let index = driver.device(device)?;
        driver.set_primary_flags(index, flags, true)
    };

    call cuDevicePrimaryCtxGetState(device: c_int, flags: Out<c_uint>, active: Out<c_int>) |driver| {
        let index = driver.device(device)?;
        let primary = &driver.devices[index].primary;
        flags.put(primary.flags)?;
        active.put(c_int::from(driver.contexts.contains_key(&primary.handle)))
    };

    // The symbol of CUDA 3.1 and before.
    call cuCtxCreate(context: Out<usize>, flags: c_uint, device: c_int) |driver| create(driver, context, flags, device, 3010);

    call cuCtxCreate_v2(context: Out<usize>, flags: c_uint, device: c_int) |driver| create(driver, context, flags, device, 3020);

    // The symbol of CUDA 11.4. No affinity is supported.
    call cuCtxCreate_v3(context: Out<usize>, _affinities: usize, count: c_int, flags: c_uint, device: c_int) |driver| {
        match count {
            0 => create(driver, context, flags, device, 3020),
            _ => Err(INVALID_VALUE),
        }
    };

    // The symbol of CUDA 12.5. The parameters (`CUctxCreateParams`) are about affinity and graphics; none are supported.
    call cuCtxCreate_v4(context: Out<usize>, parameters: In<[usize; 3]>, flags: c_uint, device: c_int) |driver| {
        match parameters.get() {
            Ok([0, 0, 0]) | Err(_) => create(driver, context, flags, device, 3020),
            Ok(_) => Err(INVALID_VALUE),
        }
    };

    call [cuCtxDestroy, cuCtxDestroy_v2](context: usize) |driver| driver.destroy_context(context);

    call [cuCtxPushCurrent, cuCtxPushCurrent_v2](context: usize) |driver| {
        driver.context(context)?;
        push(context);
        Ok(())
    };

    call [cuCtxPopCurrent, cuCtxPopCurrent_v2](context: Out<usize>) |_driver| {
        let popped = pop()?;
        context.put_if_present(popped);
        Ok(())
    };

    call cuCtxSetCurrent(context: usize) |driver| {
        if context != 0 {
            driver.context(context)?;
        }
        set(context);
        Ok(())
    };

    call cuCtxGetCurrent(context: Out<usize>) |_driver| context.put(top().unwrap_or(0));

    call cuCtxGetDevice(device: Out<c_int>) |driver| device.put(driver.current_device()? as c_int);

    // The symbol of CUDA 13.0.
    call cuCtxGetDevice_v2(device: Out<c_int>, context: usize) |driver| device.put(driver.context_or_current(context)?.device as c_int);

    call cuCtxSetLimit(which: c_int, value: usize) |driver| driver.set_limit(usize::try_from(which).unwrap_or(usize::MAX), value as u64);

    call cuCtxGetLimit(value: Out<usize>, which: c_int) |driver| {
        let current = driver.current()?;
        let limits = driver.contexts[&current].limits.0;
        let limit = usize::try_from(which).ok().and_then(|which| limits.get(which));
        value.put(*limit.ok_or(UNSUPPORTED_LIMIT)? as usize)
    };

    call cuCtxGetFlags(flags: Out<c_uint>) |driver| {
        let current = driver.current()?;
        flags.put(driver.contexts[&current].flags)
    };

    call cuCtxGetApiVersion(context: usize, version: Out<c_uint>) |driver| {
        let known = driver.context_or_current(context)?.api_version;
        version.put(known)
    };
}

/// Make a context and make it current.
fn create(
    driver: &mut SimulatedDriver,
    context: Out<usize>,
    flags: c_uint,
    device: c_int,
    api_version: u32,
) -> Result<(), CuCode> {
    context.present()?;
    let index = driver.device(device)?;
    let handle = driver.create_context(index, flags, api_version)?;
    push(handle);
    context.put(handle)
}
