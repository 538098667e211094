//! What the driver counts and reports about the health of a GPU.

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::{EccCounter, MemoryError};
use nvml_wrapper::error::NvmlError;

use super::ffi;
use crate::GpuFacts;

/// Add the values to a GPU. One that the driver does not return is absent, whatever the reason: it says nothing about whether programs can use the
/// GPU. Only the loss of the GPU does.
pub(super) fn add(nvml: &Nvml, gpu: &mut GpuFacts) {
    if let Err(error @ NvmlError::GpuLost) = read(nvml, gpu) {
        gpu.lost = true;
        gpu.error.get_or_insert_with(|| format!("health: {error}"));
    }
}

fn read(nvml: &Nvml, gpu: &mut GpuFacts) -> Result<(), NvmlError> {
    let device = nvml.device_by_uuid(gpu.uuid.as_str())?;
    gpu.uncorrected_ecc_errors = known(device.total_ecc_errors(MemoryError::Uncorrected, EccCounter::Volatile))?;
    gpu.remapped_rows = known(ffi::remapped_rows(&device))?;
    if gpu.remapped_rows.is_none() {
        gpu.retired_pages_pending = known(device.are_pages_pending_retired())?;
    }
    gpu.clocks_event_reasons = known(ffi::clocks_event_reasons(&device))?;
    Ok(())
}

/// Return a value, or `None` if the driver does not return it. The loss of the GPU stays an error.
pub(super) fn known<T>(answer: Result<T, NvmlError>) -> Result<Option<T>, NvmlError> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(NvmlError::GpuLost) => Err(NvmlError::GpuLost),
        Err(_) => Ok(None),
    }
}
