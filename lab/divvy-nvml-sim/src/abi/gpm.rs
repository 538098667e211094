//! Symbols for GPU Performance Monitoring. nvml.h has them from CUDA 12.0 on, and not yet in CUDA 11.6.

use std::ffi::c_uint;
use std::ptr::without_provenance_mut;

use nvml_wrapper_sys::bindings as ffi;

use super::gauges::call;
use super::{INVALID_ARGUMENT, NOT_SUPPORTED, answer, put};
use crate::gauges;
use crate::sim::{NvmlFailure, SampleSubject, sim};

/// The first compute capability of Hopper. "For Hopper or newer fully supported devices" (nvml.h).
const HOPPER: u32 = 9;

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmQueryDeviceSupport(
    device: ffi::nvmlDevice_t,
    support: *mut ffi::nvmlGpmSupport_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        // SAFETY: null, or the caller's structure, whose version the API requires the caller to set.
        let version = unsafe { support.as_ref() }.map(|support| support.version);
        if version != Some(ffi::NVML_GPM_SUPPORT_VERSION) {
            return Err(INVALID_ARGUMENT);
        }
        call(device, "nvmlGpmQueryDeviceSupport", |_, card, _| {
            let answer = ffi::nvmlGpmSupport_t {
                version: ffi::NVML_GPM_SUPPORT_VERSION,
                isSupportedDevice: (card.cc.0 >= HOPPER).into(),
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(support, answer) }
        })
    })
}

/// A handle is never dereferenced: it is the sample's number.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmSampleAlloc(sample: *mut ffi::nvmlGpmSample_t) -> ffi::nvmlReturn_t {
    answer(|| {
        if sample.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        let number = sim().call(|inner, _| Ok(inner.create_sample()))?;
        // SAFETY: the caller's out parameter.
        unsafe { put(sample, without_provenance_mut(number)) }
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleFree(sample: ffi::nvmlGpmSample_t) -> ffi::nvmlReturn_t {
    answer(|| sim().call(|inner, _| inner.free_sample(sample.addr())))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmSampleGet(device: ffi::nvmlDevice_t, sample: ffi::nvmlGpmSample_t) -> ffi::nvmlReturn_t {
    answer(|| {
        let gpu = call(device, "nvmlGpmSampleGet", |_, card, index| match card.cc.0 {
            HOPPER.. => Ok(index),
            _ => Err(NOT_SUPPORTED),
        })?;
        fill(sample, gpu, None)
    })
}

#[unsafe(no_mangle)]
extern "C" fn nvmlGpmMigSampleGet(
    device: ffi::nvmlDevice_t,
    instance: c_uint,
    sample: ffi::nvmlGpmSample_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        let gpu = call(device, "nvmlGpmMigSampleGet", |_, card, index| match card.cc.0 {
            HOPPER.. if card.mig.iter().any(|mig| mig.gpu_instance == instance) => Ok(index),
            HOPPER.. => Err(INVALID_ARGUMENT),
            _ => Err(NOT_SUPPORTED),
        })?;
        fill(sample, gpu, Some(instance))
    })
}

fn fill(sample: ffi::nvmlGpmSample_t, gpu: usize, instance: Option<u32>) -> Result<(), NvmlFailure> {
    let at = divvy_gpu_sim::monotonic();
    sim().call(|inner, _| inner.fill_sample(sample.addr(), SampleSubject { gpu, instance, at }))
}

/// Return the GPU of two samples, and the GPU instance, if the second one was taken later.
fn of_both(first: SampleSubject, second: SampleSubject) -> Result<(usize, Option<u32>), NvmlFailure> {
    let is_same = first.gpu == second.gpu && first.instance == second.instance;
    if is_same && first.at < second.at {
        Ok((first.gpu, first.instance))
    } else {
        Err(INVALID_ARGUMENT)
    }
}

/// The values are current values, not means. If the simulated GPU lacks a metric, the call succeeds, and the metric's return code says so.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpmMetricsGet(request: *mut ffi::nvmlGpmMetricsGet_t) -> ffi::nvmlReturn_t {
    answer(|| {
        if request.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's structure. Its array has another length in each version of nvml.h, so only the fields before it are read as a whole.
        let (version, count, first, second) = unsafe {
            (
                (*request).version,
                (*request).numMetrics,
                (*request).sample1,
                (*request).sample2,
            )
        };
        if version != ffi::NVML_GPM_METRICS_GET_VERSION || count > ffi::nvmlGpmMetricId_t_NVML_GPM_METRIC_MAX {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: as above; this reads nothing.
        let metrics = unsafe { &raw mut (*request).metrics }.cast::<ffi::nvmlGpmMetric_t>();
        sim().call(|inner, machine| {
            let (index, instance) = of_both(inner.sample(first.addr())?, inner.sample(second.addr())?)?;
            let card = inner.present(machine, index)?;
            inner.is_readable(index, "nvmlGpmMetricsGet")?;
            for at in 0..count as usize {
                // SAFETY: the caller's array has `numMetrics` metrics, each with its id.
                let metric = unsafe { &mut *metrics.add(at) };
                let value = gauges::gpm(card, inner.gpu(index), instance, metric.metricId);
                metric.nvmlReturn = value.map_or(NOT_SUPPORTED, |_| ffi::nvmlReturn_enum_NVML_SUCCESS);
                metric.value = value.unwrap_or_default();
            }
            Ok(())
        })
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn only_samples_of_one_gpu_in_their_order_are_compared() {
        let of = |gpu, instance, seconds| SampleSubject {
            gpu,
            instance,
            at: Duration::from_secs(seconds),
        };
        let sample = |gpu, seconds| of(gpu, None, seconds);
        for (first, second, expected) in [
            (sample(3, 1), sample(3, 2), Ok((3, None))),
            (of(3, Some(7), 1), of(3, Some(7), 2), Ok((3, Some(7)))),
            (sample(3, 2), sample(3, 1), Err(INVALID_ARGUMENT)),
            (sample(3, 1), sample(3, 1), Err(INVALID_ARGUMENT)),
            (sample(3, 1), sample(4, 2), Err(INVALID_ARGUMENT)),
            (of(3, Some(7), 1), of(3, Some(8), 2), Err(INVALID_ARGUMENT)),
            (of(3, Some(7), 1), sample(3, 2), Err(INVALID_ARGUMENT)),
        ] {
            assert_eq!(of_both(first, second), expected, "{first:?} {second:?}");
        }
    }
}
