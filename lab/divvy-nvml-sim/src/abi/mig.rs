//! Symbols for GPUs that are divided into MIG devices (nvml.h, "Multi Instance GPU Management").

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer, device_call, handle_of, put};
use crate::machine::{NvmlCard, NvmlMachine, SimMigDevice};
use crate::sim::{NvmlFailure, NvmlSimState, sim};

/// The limit of GPU indices. The handle of a MIG device contains the GPU's handle in the bits below this value, and the MIG device's index plus 1
/// above them.
pub(super) const FIRST: usize = 1 << 16;

fn handle_of_mig(card: usize, index: usize) -> ffi::nvmlDevice_t {
    std::ptr::without_provenance_mut((index + 1) * FIRST + card + 1)
}

/// Return the GPU's index and the MIG device's index; `None` if the handle is not that of a MIG device.
fn place_of(device: ffi::nvmlDevice_t) -> Option<(usize, usize)> {
    let mig = (device.addr() / FIRST).checked_sub(1)?;
    Some(((device.addr() % FIRST).checked_sub(1)?, mig))
}

pub(super) fn is(device: ffi::nvmlDevice_t) -> bool {
    place_of(device).is_some()
}

/// Return the index of a MIG device among the MIG devices of its GPU.
pub(super) fn index_of(device: ffi::nvmlDevice_t) -> Option<usize> {
    place_of(device).map(|(_, index)| index)
}

/// Return the GPU's index and the handle of the MIG device with this UUID.
pub(super) fn by_uuid(machine: &NvmlMachine, uuid: &str) -> Option<(usize, ffi::nvmlDevice_t)> {
    let mut cards = machine.cards.iter().enumerate();
    cards.find_map(|(card, described)| {
        let index = described.mig.iter().position(|mig| mig.uuid == uuid)?;
        Some((card, handle_of_mig(card, index)))
    })
}

/// Run a call that concerns a GPU, or a MIG device of it: in this case with the position of the MIG device.
pub(super) fn call_with_part<T>(
    device: ffi::nvmlDevice_t,
    work: impl FnOnce(&NvmlSimState, &NvmlCard, usize, Option<usize>) -> Result<T, NvmlFailure>,
) -> Result<T, NvmlFailure> {
    let Some((index, mig)) = place_of(device) else {
        return device_call(device, |inner, card, index| work(inner, card, index, None));
    };
    sim().call(|inner, machine| {
        let card = inner.present(machine, index)?;
        card.mig.get(mig).ok_or(INVALID_ARGUMENT)?;
        work(inner, card, index, Some(mig))
    })
}

/// Run a call that concerns one MIG device. Fail if its GPU is lost.
pub(super) fn call<T>(
    device: ffi::nvmlDevice_t,
    work: impl FnOnce(&SimMigDevice) -> Result<T, NvmlFailure>,
) -> Result<T, NvmlFailure> {
    call_with_card(device, |_, mig| work(mig))
}

pub(super) fn call_with_card<T>(
    device: ffi::nvmlDevice_t,
    work: impl FnOnce(&NvmlCard, &SimMigDevice) -> Result<T, NvmlFailure>,
) -> Result<T, NvmlFailure> {
    let (card, index) = place_of(device).ok_or(INVALID_ARGUMENT)?;
    sim().call(|inner, machine| {
        let card = inner.present(machine, card)?;
        work(card, card.mig.get(index).ok_or(INVALID_ARGUMENT)?)
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigMode(
    device: ffi::nvmlDevice_t,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |inner, card, index| {
            if !card.is_mig_capable() {
                return Err(NOT_SUPPORTED);
            }
            inner.mig_mode_is_readable(index)?;
            let mode = match card.described.mig {
                Some(_) => ffi::NVML_DEVICE_MIG_ENABLE,
                None => ffi::NVML_DEVICE_MIG_DISABLE,
            };
            // SAFETY: the caller's out parameters.
            unsafe {
                put(current, mode)?;
                put(pending, mode)
            }
        })
    })
}

/// Return the largest possible number of MIG devices. A caller that iterates over the indices therefore also meets indices without a device.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMaxMigDeviceCount(device: ffi::nvmlDevice_t, count: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            let most = if card.described.mig.is_none() {
                0
            } else {
                card.mig.len().max(7)
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(count, most as c_uint) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMigDeviceHandleByIndex(
    device: ffi::nvmlDevice_t,
    index: c_uint,
    mig: *mut ffi::nvmlDevice_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, own| {
            card.mig.get(index as usize).ok_or(NOT_FOUND)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(mig, handle_of_mig(own, index as usize)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
    mig: ffi::nvmlDevice_t,
    device: *mut ffi::nvmlDevice_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let (card, _) = place_of(mig).ok_or(INVALID_ARGUMENT)?;
        call(mig, |_| {
            // SAFETY: the caller's out parameter.
            unsafe { put(device, handle_of(card)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceIsMigDeviceHandle(device: ffi::nvmlDevice_t, is_mig: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        let answer = if is(device) {
            call(device, |_| Ok(1))?
        } else {
            device_call(device, |_, _, _| Ok(0))?
        };
        // SAFETY: the caller's out parameter.
        unsafe { put(is_mig, answer) }
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceId(device: ffi::nvmlDevice_t, id: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, |mig| {
            // SAFETY: the caller's out parameter.
            unsafe { put(id, mig.gpu_instance) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeInstanceId(device: ffi::nvmlDevice_t, id: *mut c_uint) -> ffi::nvmlReturn_t {
    answer(|| {
        call(device, |mig| {
            // SAFETY: the caller's out parameter.
            unsafe { put(id, mig.compute_instance) }
        })
    })
}
