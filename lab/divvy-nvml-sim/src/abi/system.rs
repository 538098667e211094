//! Symbols for initialization, and for properties of the system.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings as ffi;

use super::{NOT_FOUND, NOT_SUPPORTED, answer, machine_call, put, put_text};
use crate::control;
use crate::sim::sim;

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> ffi::nvmlReturn_t {
    answer(|| sim().init(control::start))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit() -> ffi::nvmlReturn_t {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInitWithFlags(_flags: c_uint) -> ffi::nvmlReturn_t {
    nvmlInit_v2()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> ffi::nvmlReturn_t {
    answer(|| sim().shutdown())
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: ffi::nvmlReturn_t) -> *const c_char {
    let text = match result {
        0 => c"Success",
        1 => c"Uninitialized",
        2 => c"Invalid Argument",
        3 => c"Not Supported",
        4 => c"Insufficient Permissions",
        5 => c"Already Initialized",
        6 => c"Not Found",
        7 => c"Insufficient Size",
        8 => c"Insufficient External Power",
        9 => c"Driver Not Loaded",
        10 => c"Timeout",
        11 => c"Interrupt Request Issue",
        12 => c"NVML Shared Library Not Found",
        13 => c"Function Not Found",
        14 => c"Corrupted infoROM",
        15 => c"GPU is lost",
        16 => c"GPU requires reset",
        17 => c"GPU access blocked by the operating system",
        18 => c"Driver/library version mismatch",
        19 => c"In use by another client",
        20 => c"Insufficient Memory",
        21 => c"No data",
        25 => c"Argument version mismatch",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        machine_call(|machine| {
            if machine.driver.is_empty() {
                return Err(NOT_SUPPORTED);
            }
            // SAFETY: the caller's buffer has `length` bytes.
            unsafe { put_text(version, length, &machine.driver) }
        })
    })
}

/// NVML's version has the form `12.550.54.15`: CUDA's major version, followed by the driver's version.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        machine_call(|machine| {
            let text = format!("{}.{}", machine.cuda_version() / 1000, machine.driver);
            // SAFETY: the caller's buffer has `length` bytes.
            unsafe { put_text(version, length, &text) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion_v2(version: *mut c_int) -> ffi::nvmlReturn_t {
    answer(|| {
        machine_call(|machine| {
            // SAFETY: the caller's out parameter.
            unsafe { put(version, machine.cuda_version()) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetCudaDriverVersion(version: *mut c_int) -> ffi::nvmlReturn_t {
    // SAFETY: the same contract.
    unsafe { nvmlSystemGetCudaDriverVersion_v2(version) }
}

/// The name is read from `/proc`, as in NVML.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlSystemGetProcessName(pid: c_uint, name: *mut c_char, length: c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        machine_call(|_| {
            let command = std::fs::read(format!("/proc/{pid}/cmdline")).map_err(|_| NOT_FOUND)?;
            let first = command.split(|byte| *byte == 0).next().unwrap_or_default();
            let text = String::from_utf8_lossy(first);
            // SAFETY: the caller's buffer has `length` bytes.
            unsafe { put_text(name, length, &text) }
        })
    })
}
