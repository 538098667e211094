//! Reads how busy processes keep a GPU (nvml.h, nvmlDeviceGetProcessUtilization).

use nvml_wrapper::Nvml;
use nvml_wrapper::error::NvmlError;

use crate::utilization::MAX_SAMPLES;
use crate::{Failure, FailureCode, UtilizationSample};

/// Return the samples of a GPU that are newer than a time in microseconds since 1970.
pub(super) fn samples(nvml: &Nvml, uuid: &str, since: u64) -> Result<Vec<UtilizationSample>, Failure> {
    let device = nvml.device_by_uuid(uuid).map_err(|error| failure(uuid, &error))?;
    let samples = match device.process_utilization_stats(since) {
        Ok(samples) => samples,
        // Nothing is newer, or more came between the two calls that the wrapper makes. Those are returned when the caller asks again.
        Err(NvmlError::NotFound | NvmlError::InsufficientSize(_)) => Vec::new(),
        Err(error) => return Err(failure(uuid, &error)),
    };
    let samples = samples.into_iter().map(|of| UtilizationSample {
        pid: of.pid,
        pod: None,
        container: None,
        at: of.timestamp,
        percent: of.sm_util,
    });
    // Some drivers fill the rest of the array with numbers that mean nothing (https://github.com/Syllo/nvtop/issues/110).
    let valid = samples.filter(|of| of.percent <= 100);
    Ok(valid.take(MAX_SAMPLES).collect())
}

fn failure(uuid: &str, error: &NvmlError) -> Failure {
    let code = match error {
        NvmlError::NotSupported | NvmlError::FunctionNotFound | NvmlError::FailedToLoadSymbol(_) => FailureCode::NotSupported,
        NvmlError::GpuLost => FailureCode::GpuLost,
        NvmlError::NoPermission => FailureCode::NoPermission,
        _ => FailureCode::Unknown,
    };
    Failure::new(
        code,
        format!("the driver does not say how busy processes keep GPU {uuid}: {error}"),
    )
}
