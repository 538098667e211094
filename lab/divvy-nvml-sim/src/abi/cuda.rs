//! The few symbols of CUDA's driver library (cuda.h) with which GPU feature discovery describes the GPU of a Tegra. So a link
//! `libcuda.so.1` to this library stands for CUDA's.

use std::ffi::{c_char, c_int, c_uint};

use nvml_wrapper_sys::bindings as ffi;

use super::{answer, machine_call, put, put_text};
use crate::control;
use crate::machine::{NvmlCard, NvmlMachine};
use crate::sim::{NvmlFailure, sim};

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR` and `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
const MAJOR: c_int = 75;
const MINOR: c_int = 76;

/// Run a symbol's body, and convert NVML's code to CUDA's.
fn cuda(body: impl FnOnce() -> Result<(), NvmlFailure>) -> c_int {
    match answer(body) {
        ffi::nvmlReturn_enum_NVML_SUCCESS => 0,
        ffi::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED => 3,
        ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => 1,
        ffi::nvmlReturn_enum_NVML_ERROR_DRIVER_NOT_LOADED => 100,
        _ => 999,
    }
}

fn card(machine: &NvmlMachine, device: c_int) -> Result<&NvmlCard, NvmlFailure> {
    let index = usize::try_from(device).ok();
    let card = index.and_then(|index| machine.cards.get(index));
    card.ok_or(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT)
}

#[unsafe(no_mangle)]
extern "C" fn cuInit(_flags: c_uint) -> c_int {
    cuda(|| sim().init(control::start))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    cuda(|| {
        // SAFETY: the caller's out parameter.
        machine_call(|machine| unsafe { put(version, machine.cuda_version()) })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    cuda(|| {
        // SAFETY: the caller's out parameter.
        machine_call(|machine| unsafe { put(count, machine.cards.len() as c_int) })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGet(device: *mut c_int, index: c_int) -> c_int {
    cuda(|| {
        machine_call(|machine| {
            card(machine, index)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(device, index) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetName(name: *mut c_char, length: c_int, device: c_int) -> c_int {
    cuda(|| {
        machine_call(|machine| {
            let card = card(machine, device)?;
            // SAFETY: the caller's buffer has `length` bytes.
            unsafe { put_text(name, length.cast_unsigned(), &card.described.model) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, attribute: c_int, device: c_int) -> c_int {
    cuda(|| {
        machine_call(|machine| {
            let (major, minor) = card(machine, device)?.cc;
            let found = match attribute {
                MAJOR => major,
                MINOR => minor,
                _ => return Err(ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT),
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(value, found as c_int) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) -> c_int {
    cuda(|| {
        machine_call(|machine| {
            let memory = card(machine, device)?.described.memory_mib << 20;
            // SAFETY: the caller's out parameter.
            unsafe { put(bytes, memory as usize) }
        })
    })
}

/// The symbol of CUDA 3.1 and before, which counts in 32 bits. NVIDIA's GPU feature discovery uses it.
#[unsafe(no_mangle)]
unsafe extern "C" fn cuDeviceTotalMem(bytes: *mut c_uint, device: c_int) -> c_int {
    cuda(|| {
        machine_call(|machine| {
            let memory = card(machine, device)?.described.memory_mib << 20;
            // SAFETY: the caller's out parameter.
            unsafe { put(bytes, c_uint::try_from(memory).unwrap_or(c_uint::MAX)) }
        })
    })
}
