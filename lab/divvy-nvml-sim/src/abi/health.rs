//! Symbols for what the driver counts and reports about the health of a GPU.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_call, mig, put};

/// The first compute capability of Ampere: "For Ampere or newer fully supported devices" (nvml.h).
const AMPERE: u32 = 8;

/// A GPU has ECC if its description or the control socket has its errors. Both counters, since the start of the driver and in all, are the same unless a
/// test sets the latter. No errors are those of a MIG device.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTotalEccErrors(
    device: ffi::nvmlDevice_t,
    kind: ffi::nvmlMemoryErrorType_t,
    counter: ffi::nvmlEccCounterType_t,
    count: *mut c_ulonglong,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's out parameter.
    answer(|| unsafe { put(count, errors(device, kind, counter)?) })
}

/// All errors are those of the GPU's memory.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMemoryErrorCounter(
    device: ffi::nvmlDevice_t,
    kind: ffi::nvmlMemoryErrorType_t,
    counter: ffi::nvmlEccCounterType_t,
    location: ffi::nvmlMemoryLocation_t,
    count: *mut c_ulonglong,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let errors = errors(device, kind, counter)?;
        let here = match location {
            ffi::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_DEVICE_MEMORY => errors,
            ffi::nvmlMemoryLocation_enum_NVML_MEMORY_LOCATION_SRAM => 0,
            _ => return Err(NOT_SUPPORTED),
        };
        // SAFETY: the caller's out parameter.
        unsafe { put(count, here) }
    })
}

/// Return the number of a GPU's ECC errors.
fn errors(
    device: ffi::nvmlDevice_t,
    kind: ffi::nvmlMemoryErrorType_t,
    counter: ffi::nvmlEccCounterType_t,
) -> Result<u64, ffi::nvmlReturn_t> {
    mig::call_with_part(device, |inner, card, index, part| {
        let since_start = inner.health(card, index).ecc_errors.ok_or(NOT_SUPPORTED)?;
        let (corrected, uncorrected) = match counter {
            _ if part.is_some() => (0, 0),
            ffi::nvmlEccCounterType_enum_NVML_AGGREGATE_ECC => {
                let set = inner.gpu(index).and_then(|changes| changes.gauges.ecc_aggregate);
                set.unwrap_or(since_start)
            }
            _ => since_start,
        };
        match (kind, counter) {
            (ffi::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED, 0 | 1) => Ok(corrected),
            (ffi::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED, 0 | 1) => Ok(uncorrected),
            _ => Err(INVALID_ARGUMENT),
        }
    })
}

/// "On MIG-enabled GPUs with active instances, querying the number of remapped rows is not supported" (nvml.h).
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetRemappedRows(
    device: ffi::nvmlDevice_t,
    correctable: *mut c_uint,
    uncorrectable: *mut c_uint,
    pending: *mut c_uint,
    failure: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |inner, card, index| {
            let rows = inner.health(card, index).remapped_rows;
            let rows = rows
                .filter(|_| card.cc.0 >= AMPERE && card.mig.is_empty())
                .ok_or(NOT_SUPPORTED)?;
            // SAFETY: the caller's out parameters.
            unsafe {
                put(correctable, rows.correctable)?;
                put(uncorrectable, rows.uncorrectable)?;
                put(pending, rows.pending.into())?;
                put(failure, rows.failure.into())
            }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetRetiredPagesPendingStatus(
    device: ffi::nvmlDevice_t,
    pending: *mut ffi::nvmlEnableState_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |inner, card, index| {
            let is_pending = inner.health(card, index).retired_pages_pending.ok_or(NOT_SUPPORTED)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(pending, is_pending.into()) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksEventReasons(
    device: ffi::nvmlDevice_t,
    reasons: *mut c_ulonglong,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |inner, card, index| {
            let bits = inner.health(card, index).clocks_event_reasons.ok_or(NOT_SUPPORTED)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(reasons, bits) }
        })
    })
}

/// The older name, which newer drivers have, too.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    device: ffi::nvmlDevice_t,
    reasons: *mut c_ulonglong,
) -> ffi::nvmlReturn_t {
    // SAFETY: the same contract.
    unsafe { nvmlDeviceGetCurrentClocksEventReasons(device, reasons) }
}
