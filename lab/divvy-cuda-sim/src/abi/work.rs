//! Symbols for streams, events, modules, and launches.

use std::ffi::{c_int, c_uint};
use std::mem::offset_of;

use divvy_ptx::Kernel;

use super::pointer::{CodeImage, Extra, In, InOut, JitOptions, LaunchArguments, Out, TextPointer, parameters};
use super::symbols::symbols;
use crate::codes::{CuCode, INVALID_HANDLE, INVALID_VALUE, NOT_READY, NOT_SUPPORTED};
use crate::driver::SimulatedDriver;
use crate::trace::complain;
use crate::work::{now, slowness};

/// `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct LaunchConfig {
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: usize,
    attributes: usize,
    count: c_uint,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
struct LaunchParams {
    function: usize,
    grid: [c_uint; 3],
    block: [c_uint; 3],
    shared: c_uint,
    stream: usize,
    arguments: LaunchArguments,
}

// The layout in cuda.h.
const _: () = assert!(size_of::<LaunchConfig>() == 56 && offset_of!(LaunchConfig, stream) == 32);
const _: () =
    assert!(size_of::<LaunchParams>() == 56 && offset_of!(LaunchParams, stream) == 40 && size_of::<LaunchArguments>() == 8);

symbols! {
    call cuStreamCreate(stream: Out<usize>, _flags: c_uint) |driver| {
        stream.present()?;
        stream.put(driver.create_stream()?)
    };

    call cuStreamCreateWithPriority(stream: Out<usize>, _flags: c_uint, _priority: c_int) |driver| {
        stream.present()?;
        stream.put(driver.create_stream()?)
    };

    call [cuStreamDestroy, cuStreamDestroy_v2](stream: usize) |driver| driver.destroy_stream(stream);

    wait [cuStreamSynchronize, cuStreamSynchronize_ptsz](stream: usize) |driver| {
        let stream = *driver.stream(stream)?;
        driver.settle_pools(stream.device)?;
        Ok(stream.ends)
    };

    call [cuStreamQuery, cuStreamQuery_ptsz](stream: usize) |driver| if driver.stream(stream)?.ends > now() { Err(NOT_READY) } else { Ok(()) };

    call [cuStreamWaitEvent, cuStreamWaitEvent_ptsz](stream: usize, event: usize, _flags: c_uint) |driver| {
        let until = driver.work.events.get(&event).ok_or(INVALID_HANDLE)?.unwrap_or(0);
        let stream = driver.stream(stream)?;
        stream.ends = stream.ends.max(until);
        Ok(())
    };

    wait cuCtxSynchronize() |driver| {
        let device = driver.current_device()?;
        driver.settle_pools(device)?;
        Ok(driver.device_ends(device))
    };

    // The symbol of CUDA 13.0.
    wait cuCtxSynchronize_v2(context: usize) |driver| {
        let device = driver.context_or_current(context)?.device;
        driver.settle_pools(device)?;
        Ok(driver.device_ends(device))
    };

    call cuEventCreate(event: Out<usize>, _flags: c_uint) |driver| {
        event.present()?;
        driver.current()?;
        let handle = driver.new_handle();
        driver.work.events.insert(handle, None);
        event.put(handle)
    };

    call [cuEventDestroy, cuEventDestroy_v2](event: usize) |driver| driver.work.events.remove(&event).map(drop).ok_or(INVALID_HANDLE);

    call [cuEventRecord, cuEventRecord_ptsz](event: usize, stream: usize) |driver| record(driver, event, stream);

    call [cuEventRecordWithFlags, cuEventRecordWithFlags_ptsz](event: usize, stream: usize, _flags: c_uint) |driver| record(driver, event, stream);

    wait cuEventSynchronize(event: usize) |driver| {
        let until = driver.work.events.get(&event).ok_or(INVALID_HANDLE)?.unwrap_or(0);
        if let Ok(device) = driver.current_device() {
            driver.settle_pools(device)?;
        }
        Ok(until)
    };

    call cuEventQuery(event: usize) |driver| {
        let until = driver.work.events.get(&event).ok_or(INVALID_HANDLE)?.unwrap_or(0);
        if until > now() { Err(NOT_READY) } else { Ok(()) }
    };

    call [cuEventElapsedTime, cuEventElapsedTime_v2](milliseconds: Out<f32>, from: usize, to: usize) |driver| {
        let at = |event: usize| driver.work.events.get(&event).copied().flatten().ok_or(INVALID_HANDLE);
        let (from, to) = (at(from)?, at(to)?);
        if from.max(to) > now() {
            return Err(NOT_READY);
        }
        milliseconds.put(((to as f64 - from as f64) * slowness() / 1e6) as f32)
    };

    // Files and binaries are not read: each such module has each function.
    call [cuModuleLoad, cuModuleLoadFatBinary](module: Out<usize>, code: In<u8>) |driver| {
        code.get()?;
        load(driver, module, None, None)
    };

    call cuModuleLoadData(module: Out<usize>, code: CodeImage) |driver| {
        code.present()?;
        load(driver, module, code.ptx()?, None)
    };

    call cuModuleLoadDataEx(module: Out<usize>, code: CodeImage, count: c_uint, names: In<c_int>, values: InOut<usize>) |driver| {
        code.present()?;
        load(driver, module, code.ptx()?, Some(JitOptions { count, names, values }))
    };

    call cuModuleUnload(module: usize) |driver| driver.work.modules.remove(&module).map(drop).ok_or(INVALID_HANDLE);

    call cuModuleGetFunction(function: Out<usize>, module: usize, name: TextPointer) |driver| {
        function.present()?;
        function.put(driver.create_function(module, name.get()?)?)
    };

    call [cuLaunchKernel, cuLaunchKernel_ptsz](
        function: usize,
        gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        _shared: c_uint, stream: usize, arguments: LaunchArguments, extra: Extra,
    ) |driver| {
        driver.launch(function, stream, [gx, gy, gz], [bx, by, bz], |kernel| parameters(kernel, arguments, extra))
    };

    call [cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz](
        function: usize,
        gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint,
        _shared: c_uint, stream: usize, arguments: LaunchArguments,
    ) |driver| {
        driver.launch(function, stream, [gx, gy, gz], [bx, by, bz], |kernel| parameters(kernel, arguments, Extra::NONE))
    };

    call [cuLaunchKernelEx, cuLaunchKernelEx_ptsz](config: In<LaunchConfig>, function: usize, arguments: LaunchArguments, extra: Extra) |driver| {
        let config = config.get()?;
        driver.launch(function, config.stream, config.grid, config.block, |kernel| parameters(kernel, arguments, extra))
    };

    call cuLaunchCooperativeKernelMultiDevice(launches: In<LaunchParams>, count: c_uint, _flags: c_uint) |driver| {
        if count == 0 {
            return Err(INVALID_VALUE);
        }
        for index in 0..count {
            let of = launches.at(index)?;
            driver.launch(of.function, of.stream, of.grid, of.block, |kernel| parameters(kernel, of.arguments, Extra::NONE))?;
        }
        Ok(())
    };

    // The symbols before CUDA 4. Their stream is the default one, and their parameters are set by calls that are not simulated.
    call cuLaunch(function: usize) |driver| driver.launch(function, 0, [1; 3], [1; 3], without_parameters);

    call cuLaunchGrid(function: usize, width: c_int, height: c_int) |driver| {
        driver.launch(function, 0, grid(width, height)?, [1; 3], without_parameters)
    };

    call cuLaunchGridAsync(function: usize, width: c_int, height: c_int, stream: usize) |driver| {
        driver.launch(function, stream, grid(width, height)?, [1; 3], without_parameters)
    };
}

fn grid(width: c_int, height: c_int) -> Result<[c_uint; 3], CuCode> {
    let edge = |edge: c_int| c_uint::try_from(edge).map_err(|_| INVALID_VALUE);
    Ok([edge(width)?, edge(height)?, 1])
}

fn record(driver: &mut SimulatedDriver, event: usize, stream: usize) -> Result<(), CuCode> {
    let ends = driver.stream(stream)?.ends;
    *driver.work.events.get_mut(&event).ok_or(INVALID_HANDLE)? = Some(ends.max(now()));
    Ok(())
}

/// CU_JIT_INFO_LOG_BUFFER, its size, CU_JIT_ERROR_LOG_BUFFER, and its size.
const INFORMATION: (c_int, c_int) = (3, 4);
const ERRORS: (c_int, c_int) = (5, 6);

fn load(driver: &mut SimulatedDriver, module: Out<usize>, ptx: Option<&str>, options: Option<JitOptions>) -> Result<(), CuCode> {
    module.present()?;
    driver.current()?;
    let loaded = driver.load(ptx);
    let errors = loaded.as_ref().err().map_or("", |(_, log)| log);
    match options {
        Some(options) => {
            options.log(INFORMATION.0, INFORMATION.1, "")?;
            options.log(ERRORS.0, ERRORS.1, errors)?;
        }
        None if !errors.is_empty() => complain(errors),
        None => {}
    }
    module.put(loaded.map_err(|(code, _)| code)?)
}

fn without_parameters(kernel: &Kernel) -> Result<Vec<u8>, CuCode> {
    match kernel.parameters() {
        [] => Ok(Vec::new()),
        _ => Err(NOT_SUPPORTED),
    }
}
