//! Symbols for event sets.

use std::ffi::{c_uint, c_ulonglong};
use std::time::Duration;

use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_call, handle_of, index_of, put};
use crate::sim::{XidEvent, sim};

/// The event types that NVIDIA's device plugin registers: SingleBitEcc, DoubleBitEcc, and XidCritical. Only XIDs occur here.
const SUPPORTED: c_ulonglong = 1 | 2 | 8;
const XID_CRITICAL: c_ulonglong = 8;
/// The value for "no MIG instance", which a driver reports for an event of the whole GPU.
const NONE: c_uint = c_uint::MAX;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetCreate(set: *mut ffi::nvmlEventSet_t) -> ffi::nvmlReturn_t {
    answer(|| {
        sim().call(|inner, _| {
            if set.is_null() {
                return Err(INVALID_ARGUMENT);
            }
            let handle = std::ptr::without_provenance_mut(inner.create_set()?);
            // SAFETY: the caller's out parameter.
            unsafe { put(set, handle) }
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlEventSetFree(set: ffi::nvmlEventSet_t) -> ffi::nvmlReturn_t {
    answer(|| sim().call(|inner, _| inner.free_set(set.addr())))
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetSupportedEventTypes(device: ffi::nvmlDevice_t, types: *mut c_ulonglong) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, _, _| {
            // SAFETY: the caller's out parameter.
            unsafe { put(types, SUPPORTED) }
        })
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceRegisterEvents(
    device: ffi::nvmlDevice_t,
    types: c_ulonglong,
    set: ffi::nvmlEventSet_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let index = index_of(device)?;
        sim().call(|inner, machine| {
            inner.present(machine, index)?;
            if types & !SUPPORTED != 0 {
                return Err(NOT_SUPPORTED);
            }
            inner.register(set.addr(), index)
        })
    })
}

/// Wait for an event for at most `timeout` milliseconds. An event of a lost GPU is delivered as well.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait_v2(
    set: ffi::nvmlEventSet_t,
    data: *mut ffi::nvmlEventData_t,
    timeout: c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        if data.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let XidEvent { gpu, xid, instances } = sim().wait(set.addr(), Duration::from_millis(timeout.into()))?;
        let (gpu_instance, compute_instance) = instances.unwrap_or((NONE, NONE));
        let event = ffi::nvmlEventData_t {
            device: handle_of(gpu),
            eventType: XID_CRITICAL,
            eventData: xid,
            gpuInstanceId: gpu_instance,
            computeInstanceId: compute_instance,
        };
        // SAFETY: the caller's out parameter.
        unsafe { put(data, event) }
    })
}

/// The first version, which does not know MIG: it leaves the instances as they are.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlEventSetWait(
    set: ffi::nvmlEventSet_t,
    data: *mut ffi::nvmlEventData_t,
    timeout: c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        if data.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let XidEvent { gpu, xid, .. } = sim().wait(set.addr(), Duration::from_millis(timeout.into()))?;
        // SAFETY: the caller's out parameter, which is not null.
        unsafe {
            put(&raw mut (*data).device, handle_of(gpu))?;
            put(&raw mut (*data).eventType, XID_CRITICAL)?;
            put(&raw mut (*data).eventData, xid)
        }
    })
}
