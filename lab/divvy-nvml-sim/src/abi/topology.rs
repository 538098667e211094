//! Symbols for the connections between GPUs.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as ffi;

use super::device::pci_info;
use super::{INVALID_ARGUMENT, NOT_SUPPORTED, answer, device_call, index_of, put};
use crate::machine::NvmlCard;
use crate::sim::{NvmlFailure, sim};

/// The largest number of NVLinks that NVML reports (NVML_NVLINK_MAX_LINKS). A description may have more.
const MAX_LINKS: usize = 18;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetTopologyCommonAncestor(
    device1: ffi::nvmlDevice_t,
    device2: ffi::nvmlDevice_t,
    level: *mut ffi::nvmlGpuTopologyLevel_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let (a, b) = (index_of(device1)?, index_of(device2)?);
        sim().call(|inner, machine| {
            inner.present(machine, a)?;
            inner.present(machine, b)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(level, machine.common_ancestor(a, b)) }
        })
    })
}

/// Return the GPU at the other end of an NVLink; `None` for a link that is not connected.
fn peer(card: &NvmlCard, link: c_uint) -> Result<Option<usize>, NvmlFailure> {
    let link = link as usize;
    if link >= MAX_LINKS.max(card.nvlinks.len()) {
        return Err(INVALID_ARGUMENT);
    }
    if card.nvlinks.is_empty() {
        return Err(NOT_SUPPORTED);
    }
    Ok(card.nvlinks.get(link).copied())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkState(
    device: ffi::nvmlDevice_t,
    link: c_uint,
    active: *mut ffi::nvmlEnableState_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            let state = peer(card, link)?.is_some().into();
            // SAFETY: the caller's out parameter.
            unsafe { put(active, state) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetNvLinkRemotePciInfo_v2(
    device: ffi::nvmlDevice_t,
    link: c_uint,
    pci: *mut ffi::nvmlPciInfo_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let index = index_of(device)?;
        sim().call(|inner, machine| {
            let peer = peer(inner.present(machine, index)?, link)?.ok_or(NOT_SUPPORTED)?;
            let card = machine.cards.get(peer).ok_or(INVALID_ARGUMENT)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(pci, pci_info(card.pci)) }
        })
    })
}
