//! Symbols for what the driver measures of a GPU: power, energy, clocks, and the like.

use std::ffi::{c_int, c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_call, put};
use crate::gauges;
use crate::machine::NvmlCard;
use crate::sim::{NvmlFailure, NvmlSimState};

/// The first compute capability of Volta. "For Volta or newer fully supported devices" (nvml.h).
const VOLTA: u32 = 7;
/// The time that a utilization is about.
const PERIOD_US: c_uint = 167_000;

/// Run a function that a test can make fail.
pub(super) fn call<T>(
    device: ffi::nvmlDevice_t,
    name: &str,
    work: impl FnOnce(&NvmlSimState, &NvmlCard, usize) -> Result<T, NvmlFailure>,
) -> Result<T, NvmlFailure> {
    device_call(device, |inner, card, index| {
        inner.is_readable(index, name)?;
        work(inner, card, index)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerUsage(device: ffi::nvmlDevice_t, milliwatts: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetPowerUsage", |inner, card, index| {
            // SAFETY: the caller's out parameter.
            unsafe { put(milliwatts, gauges::power(card, inner.gpu(index))) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTotalEnergyConsumption(
    device: ffi::nvmlDevice_t,
    millijoules: *mut c_ulonglong,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetTotalEnergyConsumption", |inner, card, index| {
            if card.cc.0 < VOLTA {
                return Err(NOT_SUPPORTED);
            }
            let energy = gauges::energy(card, inner.gpu(index), divvy_gpu_sim::monotonic());
            // SAFETY: the caller's out parameter.
            unsafe { put(millijoules, energy) }
        })
    })
}

/// Every clock except the memory clock (type 2) is the clock of the SMs.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetClockInfo(
    device: ffi::nvmlDevice_t,
    kind: ffi::nvmlClockType_t,
    clock: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetClockInfo", |inner, card, index| {
            let mhz = match kind {
                0 | 1 | 3 => gauges::sm_clock(card, inner.gpu(index)),
                2 => {
                    let set = inner.gpu(index).and_then(|changes| changes.gauges.memory_clock_mhz);
                    set.or(card.described.memory_clock_mhz).ok_or(NOT_SUPPORTED)?
                }
                _ => return Err(INVALID_ARGUMENT),
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(clock, mhz) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPcieReplayCounter(device: ffi::nvmlDevice_t, count: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetPcieReplayCounter", |inner, _, index| {
            let replays = inner.gpu(index).map_or(0, |changes| changes.gauges.pcie_replays);
            // SAFETY: the caller's out parameter.
            unsafe { put(count, replays) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetEncoderUtilization(
    device: ffi::nvmlDevice_t,
    percent: *mut c_uint,
    period_us: *mut c_uint,
) -> ffi::nvmlReturn_t {
    let value = |inner: &NvmlSimState, index| inner.gpu(index).and_then(|changes| changes.gauges.encoder_percent);
    // SAFETY: the caller's out parameters.
    unsafe { put_codec(device, "nvmlDeviceGetEncoderUtilization", value, percent, period_us) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetDecoderUtilization(
    device: ffi::nvmlDevice_t,
    percent: *mut c_uint,
    period_us: *mut c_uint,
) -> ffi::nvmlReturn_t {
    let value = |inner: &NvmlSimState, index| inner.gpu(index).and_then(|changes| changes.gauges.decoder_percent);
    // SAFETY: the caller's out parameters.
    unsafe { put_codec(device, "nvmlDeviceGetDecoderUtilization", value, percent, period_us) }
}

/// Write the utilization of the video encoders or decoders, which is 0 if it is not set. "On MIG-enabled GPUs, querying encoder utilization is not
/// currently supported" (nvml.h), and the same for decoders.
///
/// # Safety
/// Both pointers are null or valid for writes.
unsafe fn put_codec(
    device: ffi::nvmlDevice_t,
    name: &str,
    value: fn(&NvmlSimState, usize) -> Option<u32>,
    percent: *mut c_uint,
    period_us: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, name, |inner, card, index| {
            if card.described.mig.is_some() {
                return Err(NOT_SUPPORTED);
            }
            // SAFETY: this function's contract.
            unsafe {
                put(percent, value(inner, index).unwrap_or(0))?;
                put(period_us, PERIOD_US)
            }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPowerManagementLimit(device: ffi::nvmlDevice_t, milliwatts: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetPowerManagementLimit", |inner, card, index| {
            // SAFETY: the caller's out parameter.
            unsafe { put(milliwatts, gauges::power_limit(card, inner.gpu(index))) }
        })
    })
}

/// The lowest of all limits. Here there is one.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetEnforcedPowerLimit(device: ffi::nvmlDevice_t, milliwatts: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetEnforcedPowerLimit", |inner, card, index| {
            // SAFETY: the caller's out parameter.
            unsafe { put(milliwatts, gauges::power_limit(card, inner.gpu(index))) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPerformanceState(
    device: ffi::nvmlDevice_t,
    state: *mut ffi::nvmlPstates_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetPerformanceState", |inner, card, index| {
            // SAFETY: the caller's out parameter.
            unsafe { put(state, gauges::performance_state(card, inner.gpu(index))) }
        })
    })
}

fn fan(device: ffi::nvmlDevice_t, name: &str) -> Result<u32, NvmlFailure> {
    call(device, name, |inner, _, index| {
        let set = inner.gpu(index).and_then(|changes| changes.gauges.fan_percent);
        set.ok_or(NOT_SUPPORTED)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFanSpeed(device: ffi::nvmlDevice_t, percent: *mut c_uint) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's out parameter.
    answer(|| unsafe { put(percent, fan(device, "nvmlDeviceGetFanSpeed")?) })
}

/// Every simulated GPU has at most one fan.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFanSpeed_v2(
    device: ffi::nvmlDevice_t,
    index: c_uint,
    percent: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let speed = fan(device, "nvmlDeviceGetFanSpeed_v2")?;
        if index > 0 {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's out parameter.
        unsafe { put(percent, speed) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetDisplayActive(
    device: ffi::nvmlDevice_t,
    active: *mut ffi::nvmlEnableState_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetDisplayActive", |inner, _, index| {
            let is_active = inner.gpu(index).is_some_and(|changes| changes.gauges.display_active);
            // SAFETY: the caller's out parameter.
            unsafe { put(active, is_active.into()) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetPersistenceMode(
    device: ffi::nvmlDevice_t,
    mode: *mut ffi::nvmlEnableState_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetPersistenceMode", |inner, _, index| {
            let is_off = inner.gpu(index).is_some_and(|changes| changes.gauges.persistence_off);
            // SAFETY: the caller's out parameter.
            unsafe { put(mode, (!is_off).into()) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeMode(device: ffi::nvmlDevice_t, mode: *mut ffi::nvmlComputeMode_t) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetComputeMode", |inner, _, index| {
            let set = inner.gpu(index).map_or(0, |changes| changes.gauges.compute_mode);
            // SAFETY: the caller's out parameter.
            unsafe { put(mode, set) }
        })
    })
}

/// A GPU whose errors are described has ECC.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetEccMode(
    device: ffi::nvmlDevice_t,
    current: *mut ffi::nvmlEnableState_t,
    pending: *mut ffi::nvmlEnableState_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, "nvmlDeviceGetEccMode", |inner, card, index| {
            inner.health(card, index).ecc_errors.ok_or(NOT_SUPPORTED)?;
            let is_off = inner.gpu(index).is_some_and(|changes| changes.gauges.ecc_off);
            // SAFETY: the caller's out parameters.
            unsafe {
                put(current, (!is_off).into())?;
                put(pending, (!is_off).into())
            }
        })
    })
}

/// The only field is the memory's temperature. If the GPU lacks a field, the call succeeds, and the field's return code is NOT_SUPPORTED.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetFieldValues(
    device: ffi::nvmlDevice_t,
    count: c_int,
    values: *mut ffi::nvmlFieldValue_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let count = usize::try_from(count).map_err(|_| INVALID_ARGUMENT)?;
        if values.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        call(device, "nvmlDeviceGetFieldValues", |inner, card, index| {
            for at in 0..count {
                // SAFETY: the caller's array has `count` values, each with its fieldId.
                let value = unsafe { &mut *values.add(at) };
                let celsius = match value.fieldId {
                    ffi::field_id::NVML_FI_DEV_MEMORY_TEMP => {
                        gauges::memory_celsius(card, inner.gpu(index), inner.temperature(card, index))
                    }
                    _ => None,
                };
                (value.timestamp, value.latencyUsec) = (0, 0);
                value.nvmlReturn = NOT_SUPPORTED;
                if let Some(celsius) = celsius {
                    value.valueType = ffi::nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT;
                    value.nvmlReturn = ffi::nvmlReturn_enum_NVML_SUCCESS;
                    value.value.uiVal = celsius;
                }
            }
            Ok(())
        })
    })
}
