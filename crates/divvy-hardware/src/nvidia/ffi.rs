//! NVML calls that `nvml-wrapper` does not offer in the required form.
//!
//! The wrapper's `NvmlEventSet` drops the MIG instances of an event, and a failed registration of a GPU consumes the set. The wrapper refuses a
//! product name that is not UTF-8. It also lacks the calls of older drivers: the first version of a call has the plain name, and each
//! later version a suffix, as the `#define`s at the beginning of nvml.h show.

#![allow(unsafe_code, reason = "raw NVML calls; each block says why it is sound")]

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::time::Duration;

use divvy_model::MigParts;
use nvml_wrapper::error::{NvmlError, nvml_sym, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

use crate::{Fabric, GpuMemory, RemappedRows};

/// Return the number of GPUs.
pub(super) fn count(nvml: &Nvml) -> Result<u32, NvmlError> {
    let call = newest(&nvml.lib().nvmlDeviceGetCount_v2, &nvml.lib().nvmlDeviceGetCount)?;
    let mut count = 0;
    // SAFETY: NVML is initialized while `nvml` lives; `count` is valid for writes.
    nvml_try(unsafe { call(&raw mut count) })?;
    Ok(count)
}

/// Return the GPU with an index.
pub(super) fn by_index(nvml: &Nvml, index: u32) -> Result<Device<'_>, NvmlError> {
    let call = newest(
        &nvml.lib().nvmlDeviceGetHandleByIndex_v2,
        &nvml.lib().nvmlDeviceGetHandleByIndex,
    )?;
    let mut handle = std::ptr::null_mut();
    // SAFETY: NVML is initialized while `nvml` lives; `handle` is valid for writes.
    nvml_try(unsafe { call(index, &raw mut handle) })?;
    // SAFETY: `nvml` has just returned the handle.
    Ok(unsafe { Device::new(handle, nvml) })
}

/// Return the newest CUDA version that the driver supports, as 1000 × major + 10 × minor.
pub(super) fn cuda_version(nvml: &Nvml) -> Result<i32, NvmlError> {
    let lib = nvml.lib();
    let call = newest(&lib.nvmlSystemGetCudaDriverVersion_v2, &lib.nvmlSystemGetCudaDriverVersion)?;
    let mut version = 0;
    // SAFETY: NVML is initialized while `nvml` lives; `version` is valid for writes.
    nvml_try(unsafe { call(&raw mut version) })?;
    Ok(version)
}

/// Return the second version of a call, or its newer name, if the library has it, otherwise the first. Both have the same parameters.
fn newest<'l, F>(second: &'l Result<F, libloading::Error>, first: &'l Result<F, libloading::Error>) -> Result<&'l F, NvmlError> {
    match second {
        Ok(call) => Ok(call),
        Err(_) => nvml_sym(first.as_ref()),
    }
}

/// Return the key of a device. It is unique while NVML stays initialized. An event identifies its GPU only by this key.
pub(super) fn device_key(device: &Device<'_>) -> usize {
    // SAFETY: the handle is only compared, never used.
    unsafe { device.handle() }.addr()
}

/// Return the memory as drivers before R510 do. `used` includes the memory that the driver reserves.
pub(super) fn memory_info_v1(device: &Device<'_>) -> Result<GpuMemory, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetMemoryInfo.as_ref())?;
    let mut info = MaybeUninit::<sys::nvmlMemory_t>::zeroed();
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `info` is valid for writes. All zeros are a
    // valid nvmlMemory_t.
    let info = unsafe {
        nvml_try(call(device.handle(), info.as_mut_ptr()))?;
        info.assume_init()
    };
    Ok(GpuMemory {
        total: info.total,
        used: info.used,
        reserved: None,
        free: info.free,
    })
}

/// Which processes on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ProcessList {
    Compute,
    Graphics,
    MpsClients,
}

/// Return the PIDs of processes on a GPU, and the memory of each in bytes; 0 if the driver does not return the memory.
pub(super) fn processes(device: &Device<'_>, list: ProcessList) -> Result<Vec<(u32, u64)>, NvmlError> {
    let lib = device.nvml().lib();
    let (third, second, first) = match list {
        ProcessList::Compute => (
            &lib.nvmlDeviceGetComputeRunningProcesses_v3,
            &lib.nvmlDeviceGetComputeRunningProcesses_v2,
            &lib.nvmlDeviceGetComputeRunningProcesses,
        ),
        ProcessList::Graphics => (
            &lib.nvmlDeviceGetGraphicsRunningProcesses_v3,
            &lib.nvmlDeviceGetGraphicsRunningProcesses_v2,
            &lib.nvmlDeviceGetGraphicsRunningProcesses,
        ),
        ProcessList::MpsClients => (
            &lib.nvmlDeviceGetMPSComputeRunningProcesses_v3,
            &lib.nvmlDeviceGetMPSComputeRunningProcesses_v2,
            &lib.nvmlDeviceGetMPSComputeRunningProcesses,
        ),
    };
    let version = device.nvml().sys_driver_version().unwrap_or_default();
    let third = third.as_ref().ok().filter(|_| !has_large_processes(&version));
    let bytes = |bytes: u64| if bytes == NOT_AVAILABLE { 0 } else { bytes };
    // The first version is older than MIG.
    match third.or(second.as_ref().ok()) {
        Some(call) => {
            // SAFETY: the handle belongs to this NVML, which `device` borrows; `filled` passes an array and its length.
            let found = filled(|count, to| unsafe { call(device.handle(), count, to) })?;
            let found = found.into_iter();
            Ok(found
                .map(|one: sys::nvmlProcessInfo_v2_t| (one.pid, bytes(one.usedGpuMemory)))
                .collect())
        }
        None => {
            let call = nvml_sym(first.as_ref())?;
            // SAFETY: as above.
            let found = filled(|count, to| unsafe { call(device.handle(), count, to) })?;
            let found = found.into_iter();
            Ok(found
                .map(|one: sys::nvmlProcessInfo_v1_t| (one.pid, bytes(one.usedGpuMemory)))
                .collect())
        }
    }
}

/// `NVML_VALUE_NOT_AVAILABLE`, for a number of bytes.
const NOT_AVAILABLE: u64 = u64::MAX;

/// Return whether the third version of the lists of processes has larger elements than in all other drivers, and than nvml.h says: in drivers from 535.43 to 535.86
/// (<https://github.com/XuehaiPan/nvitop/pull/89>). Their second version is as usual.
fn has_large_processes(version: &str) -> bool {
    let mut parts = version.split('.').map(str::parse::<u32>);
    matches!((parts.next(), parts.next()), (Some(Ok(535)), Some(Ok(43..=86))))
}

/// Return what a call writes into an array. The call gets the length of the array, and the array.
fn filled<T>(call: impl Fn(*mut u32, *mut T) -> sys::nvmlReturn_t) -> Result<Vec<T>, NvmlError> {
    /// Processes can start between two calls. More often than this, the list does not outgrow the room for it.
    const TRIES: u32 = 4;
    let mut count = 0;
    let mut found: Vec<T> = Vec::new();
    for _ in 0..TRIES {
        let to = found.spare_capacity_mut().as_mut_ptr().cast();
        match nvml_try(call(&raw mut count, to)) {
            Ok(()) => {
                // SAFETY: the call has written `count` elements, and not more than it had room for.
                unsafe { found.set_len(found.capacity().min(count as usize)) };
                return Ok(found);
            }
            Err(NvmlError::InsufficientSize(_)) => {
                count += 5;
                found = Vec::with_capacity(count as usize);
            }
            Err(error) => return Err(error),
        }
    }
    Err(NvmlError::InsufficientSize(Some(count as usize)))
}

/// Return the product name of a GPU. Bytes that are not UTF-8 are replaced.
pub(super) fn name(device: &Device<'_>) -> Result<String, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetName.as_ref())?;
    let mut name = [0_u8; sys::NVML_DEVICE_NAME_V2_BUFFER_SIZE as usize];
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `name` is valid for writes of the size that is passed.
    nvml_try(unsafe {
        call(
            device.handle(),
            name.as_mut_ptr().cast(),
            sys::NVML_DEVICE_NAME_V2_BUFFER_SIZE,
        )
    })?;
    Ok(text(&name))
}

/// Return the text before the first zero.
fn text(buffer: &[u8]) -> String {
    let text = CStr::from_bytes_until_nul(buffer).map_or(buffer, CStr::to_bytes);
    String::from_utf8_lossy(text).into_owned()
}

/// Return the number of the performance state. The wrapper has a name for each number.
pub(super) fn performance_state(device: &Device<'_>) -> Result<u32, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetPerformanceState.as_ref())?;
    let mut state = sys::nvmlPStates_enum_NVML_PSTATE_UNKNOWN;
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `state` is valid for writes.
    nvml_try(unsafe { call(device.handle(), &raw mut state) })?;
    Ok(state)
}

/// Return the numbers of a MIG device's GPU instance and compute instance.
pub(super) fn mig_instances(mig: &Device<'_>) -> Result<(u32, u32), NvmlError> {
    let gpu_instance = nvml_sym(mig.nvml().lib().nvmlDeviceGetGpuInstanceId.as_ref())?;
    let compute_instance = nvml_sym(mig.nvml().lib().nvmlDeviceGetComputeInstanceId.as_ref())?;
    let (mut gi, mut ci) = (0, 0);
    // SAFETY: the handle belongs to this NVML, which `mig` borrows; `gi` is valid for writes.
    nvml_try(unsafe { gpu_instance(mig.handle(), &raw mut gi) })?;
    // SAFETY: the same; `ci` is valid for writes.
    nvml_try(unsafe { compute_instance(mig.handle(), &raw mut ci) })?;
    Ok((gi, ci))
}

/// The profiles of GPU instances are numbered from 0 up to this number, exclusive. It is higher than in today's nvml.h, so that later profiles are
/// found as well.
const PROFILES: u32 = 32;

/// Return what a MIG device consists of. `device` is its GPU, and `gi` the number of its GPU instance. `known` is what a device with the same
/// UUID consisted of: if nothing else has changed, it has the same profile, which takes up to 64 calls to find.
pub(super) fn mig_parts(device: &Device<'_>, mig: &Device<'_>, gi: u32, known: Option<MigParts>) -> Result<MigParts, NvmlError> {
    let lib = mig.nvml().lib();
    let attributes_of = newest(&lib.nvmlDeviceGetAttributes_v2, &lib.nvmlDeviceGetAttributes)?;
    let mut attributes = MaybeUninit::<sys::nvmlDeviceAttributes_t>::zeroed();
    // SAFETY: the handle belongs to this NVML, which `mig` borrows; `attributes` is valid for writes. All zeros are a valid
    // nvmlDeviceAttributes_t.
    let attributes = unsafe {
        nvml_try(attributes_of(mig.handle(), attributes.as_mut_ptr()))?;
        attributes.assume_init()
    };
    let parts = MigParts {
        gi_profile: known.and_then(|known| known.gi_profile),
        gi_slices: attributes.gpuInstanceSliceCount,
        ci_slices: attributes.computeInstanceSliceCount,
        memory: attributes.memorySizeMB,
        multiprocessors: attributes.multiprocessorCount,
        copy_engines: attributes.sharedCopyEngineCount,
        decoders: attributes.sharedDecoderCount,
        encoders: attributes.sharedEncoderCount,
        jpeg: attributes.sharedJpegCount,
        ofa: attributes.sharedOfaCount,
    };
    if known == Some(parts) {
        return Ok(parts);
    }
    Ok(MigParts {
        // Without it, only the attributes in the profile's name are unknown.
        gi_profile: gi_profile(device, gi).ok().flatten(),
        ..parts
    })
}

/// Return the number of the profile of a GPU instance. The instance reports the profile's id, which differs between GPUs.
fn gi_profile(device: &Device<'_>, gi: u32) -> Result<Option<u32>, NvmlError> {
    let lib = device.nvml().lib();
    let instance_by_id = nvml_sym(lib.nvmlDeviceGetGpuInstanceById.as_ref())?;
    let info_of = nvml_sym(lib.nvmlGpuInstanceGetInfo.as_ref())?;
    let profile_info = nvml_sym(lib.nvmlDeviceGetGpuInstanceProfileInfo.as_ref())?;
    let mut instance = std::ptr::null_mut();
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `instance` is valid for writes.
    nvml_try(unsafe { instance_by_id(device.handle(), gi, &raw mut instance) })?;
    let mut info = MaybeUninit::<sys::nvmlGpuInstanceInfo_t>::zeroed();
    // SAFETY: NVML has just returned the instance; `info` is valid for writes. All zeros are a valid nvmlGpuInstanceInfo_t, whose
    // handle may be null.
    let info = unsafe {
        nvml_try(info_of(instance, info.as_mut_ptr()))?;
        info.assume_init()
    };
    let is_it = |number: &u32| {
        let mut profile = MaybeUninit::<sys::nvmlGpuInstanceProfileInfo_t>::zeroed();
        // SAFETY: the handle belongs to this NVML, which `device` borrows; `profile` is valid for writes. All zeros are a valid
        // nvmlGpuInstanceProfileInfo_t.
        unsafe {
            nvml_try(profile_info(device.handle(), *number, profile.as_mut_ptr())).is_ok()
                && profile.assume_init().id == info.profileId
        }
    };
    Ok((0..PROFILES).find(is_it))
}

/// Return the nearest common ancestor of two GPUs on the PCI bus, as `nvmlGpuTopologyLevel_t`.
pub(super) fn common_ancestor(a: &Device<'_>, b: &Device<'_>) -> Result<u32, NvmlError> {
    let call = nvml_sym(a.nvml().lib().nvmlDeviceGetTopologyCommonAncestor.as_ref())?;
    let mut level = 0;
    // SAFETY: both handles belong to this NVML, which `a` and `b` borrow; `level` is valid for writes.
    nvml_try(unsafe { call(a.handle(), b.handle(), &raw mut level) })?;
    Ok(level)
}

/// Return the part of an NVLink fabric to which a GPU belongs; `None` if its fabric is not set up.
pub(super) fn fabric(device: &Device<'_>) -> Result<Option<Fabric>, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetGpuFabricInfo.as_ref())?;
    let mut info = MaybeUninit::<sys::nvmlGpuFabricInfo_t>::zeroed();
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `info` is valid for writes. All zeros are a valid nvmlGpuFabricInfo_t.
    let info = unsafe {
        nvml_try(call(device.handle(), info.as_mut_ptr()))?;
        info.assume_init()
    };
    let is_complete =
        u32::from(info.state) == sys::NVML_GPU_FABRIC_STATE_COMPLETED && info.status == sys::nvmlReturn_enum_NVML_SUCCESS;
    // The GPUs of a machine whose fabric does not leave the machine have no cluster (`IsFabricAttached` of NVIDIA's go-nvlib).
    let has_cluster = info.clusterUuid.iter().any(|byte| *byte != 0);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let [a, b, c, d, e] = [0..4, 4..6, 6..8, 8..10, 10..16].map(|range| hex(&info.clusterUuid[range]));
    Ok((is_complete && has_cluster).then(|| Fabric {
        cluster: format!("{a}-{b}-{c}-{d}-{e}"),
        clique: info.cliqueId,
    }))
}

/// Return which rows of a GPU's memory were replaced.
pub(super) fn remapped_rows(device: &Device<'_>) -> Result<RemappedRows, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetRemappedRows.as_ref())?;
    let (mut correctable, mut uncorrectable, mut pending, mut failure) = (0, 0, 0, 0);
    // SAFETY: the handle belongs to this NVML, which `device` borrows; all four places are valid for writes.
    nvml_try(unsafe {
        call(
            device.handle(),
            &raw mut correctable,
            &raw mut uncorrectable,
            &raw mut pending,
            &raw mut failure,
        )
    })?;
    Ok(RemappedRows {
        correctable,
        uncorrectable,
        pending: pending != 0,
        failure: failure != 0,
    })
}

/// Return why the clocks of a GPU are lower than possible, as bits. The wrapper has only the call's older name.
pub(super) fn clocks_event_reasons(device: &Device<'_>) -> Result<u64, NvmlError> {
    let lib = device.nvml().lib();
    let call = newest(
        &lib.nvmlDeviceGetCurrentClocksEventReasons,
        &lib.nvmlDeviceGetCurrentClocksThrottleReasons,
    )?;
    let mut reasons = 0;
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `reasons` is valid for writes.
    nvml_try(unsafe { call(device.handle(), &raw mut reasons) })?;
    Ok(reasons)
}

/// A sample of the counters of GPU Performance Monitoring. The wrapper's own type borrows NVML, so one value cannot own both.
#[derive(Debug)]
pub(super) struct GpmSample {
    sample: sys::nvmlGpmSample_t,
    nvml: Arc<Nvml>,
}

// SAFETY: NVML is thread-safe, and nothing but this value uses the sample, which is never changed after it was taken.
unsafe impl Send for GpmSample {}

impl GpmSample {
    /// Take a sample of a GPU, which belongs to `nvml`.
    pub(super) fn take(nvml: Arc<Nvml>, device: &Device<'_>) -> Result<GpmSample, NvmlError> {
        let fill = *nvml_sym(nvml.lib().nvmlGpmSampleGet.as_ref())?;
        // SAFETY: the handle belongs to an initialized NVML, which `device` borrows; the sample is one of this NVML.
        GpmSample::filled(nvml, |sample| unsafe { fill(device.handle(), sample) })
    }

    /// Take a sample of a GPU instance of a GPU, which belongs to `nvml`.
    pub(super) fn take_of_instance(nvml: Arc<Nvml>, device: &Device<'_>, instance: u32) -> Result<GpmSample, NvmlError> {
        let fill = *nvml_sym(nvml.lib().nvmlGpmMigSampleGet.as_ref())?;
        // SAFETY: as above. NVML refuses a number that no instance has.
        GpmSample::filled(nvml, |sample| unsafe { fill(device.handle(), instance, sample) })
    }

    fn filled(nvml: Arc<Nvml>, fill: impl FnOnce(sys::nvmlGpmSample_t) -> sys::nvmlReturn_t) -> Result<GpmSample, NvmlError> {
        let lib = nvml.lib();
        let allocate = *nvml_sym(lib.nvmlGpmSampleAlloc.as_ref())?;
        // Without it, each sample would leak.
        nvml_sym(lib.nvmlGpmSampleFree.as_ref())?;
        let mut sample = std::ptr::null_mut();
        // SAFETY: NVML is initialized while `nvml` lives; `sample` is valid for writes.
        nvml_try(unsafe { allocate(&raw mut sample) })?;
        // From here on, dropping it frees the sample.
        let taken = GpmSample { sample, nvml };
        nvml_try(fill(taken.sample))?;
        Ok(taken)
    }
}

impl Drop for GpmSample {
    fn drop(&mut self) {
        if let Ok(free) = &self.nvml.lib().nvmlGpmSampleFree {
            // SAFETY: this NVML allocated the sample, it is freed once, and NVML is initialized while `nvml` lives. A failure leaves nothing to do.
            let _ = unsafe { free(self.sample) };
        }
    }
}

/// Return what the difference between two samples of a GPU means. A metric that the driver does not return is `None`.
pub(super) fn gpm_values<const N: usize>(
    before: &GpmSample,
    after: &GpmSample,
    metrics: [sys::nvmlGpmMetricId_t; N],
) -> Result<[Option<f64>; N], NvmlError> {
    let call = nvml_sym(after.nvml.lib().nvmlGpmMetricsGet.as_ref())?;
    let request = MaybeUninit::<sys::nvmlGpmMetricsGet_t>::zeroed();
    // SAFETY: all zeros are a valid nvmlGpmMetricsGet_t.
    let mut request = unsafe { request.assume_init() };
    request.version = sys::NVML_GPM_METRICS_GET_VERSION;
    request.sample1 = before.sample;
    request.sample2 = after.sample;
    for (to, metric) in request.metrics.iter_mut().zip(metrics) {
        to.metricId = metric;
        request.numMetrics += 1;
    }
    // SAFETY: both samples are of this NVML, which lives as long as they do; `request` is valid for reads and writes, and has `numMetrics` metrics.
    nvml_try(unsafe { call(&raw mut request) })?;
    let mut found = request.metrics.iter().map(|metric| {
        let is_valid = metric.nvmlReturn == sys::nvmlReturn_enum_NVML_SUCCESS;
        is_valid.then_some(metric.value)
    });
    Ok(metrics.map(|_| found.next().flatten()))
}

/// Return the event types that a GPU supports, as bits.
pub(super) fn supported_event_types(device: &Device<'_>) -> Result<u64, NvmlError> {
    let call = nvml_sym(device.nvml().lib().nvmlDeviceGetSupportedEventTypes.as_ref())?;
    let mut types = 0;
    // SAFETY: the handle belongs to this NVML, which `device` borrows; `types` is valid for writes.
    nvml_try(unsafe { call(device.handle(), &raw mut types) })?;
    Ok(types)
}

/// An NVML event set.
pub(super) struct NvmlEventSet {
    set: sys::nvmlEventSet_t,
    nvml: Arc<Nvml>,
}

// SAFETY: NVML is thread-safe, and a set may be used from any thread by one at a time, which `&mut self` on every call
// ensures (nvml-wrapper's EventSet is Send on the same ground).
unsafe impl Send for NvmlEventSet {}

/// An event as NVML returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct RawEvent {
    /// The GPU's [`device_key`], 0 if the driver does not name a GPU.
    pub(super) device: usize,
    /// The bit of the event type.
    pub(super) kind: u64,
    /// The XID.
    pub(super) data: u64,
    pub(super) gi: Option<u32>,
    pub(super) ci: Option<u32>,
}

impl NvmlEventSet {
    pub(super) fn create(nvml: Arc<Nvml>) -> Result<NvmlEventSet, NvmlError> {
        let call = nvml_sym(nvml.lib().nvmlEventSetCreate.as_ref())?;
        let mut set = std::ptr::null_mut();
        // SAFETY: NVML is initialized while `nvml` lives; `set` is valid for writes.
        nvml_try(unsafe { call(&raw mut set) })?;
        Ok(NvmlEventSet { set, nvml })
    }

    /// Add a GPU. The set stays usable if this fails.
    pub(super) fn register(&mut self, device: &Device<'_>, types: u64) -> Result<(), NvmlError> {
        let call = nvml_sym(self.nvml.lib().nvmlDeviceRegisterEvents.as_ref())?;
        // SAFETY: the set was created by this NVML and not freed; the device borrows an initialized NVML.
        nvml_try(unsafe { call(device.handle(), types, self.set) })
    }

    /// Wait for at most `timeout`. Return [`NvmlError::Timeout`] if no event happened.
    pub(super) fn wait(&mut self, timeout: Duration) -> Result<RawEvent, NvmlError> {
        let lib = self.nvml.lib();
        // Drivers before R450 have the first version, which does not write the instances.
        let call = newest(&lib.nvmlEventSetWait_v2, &lib.nvmlEventSetWait)?;
        let names_instances = lib.nvmlEventSetWait_v2.is_ok();
        let timeout_ms = timeout.as_millis().try_into().unwrap_or(u32::MAX);
        let mut data = MaybeUninit::<sys::nvmlEventData_t>::zeroed();
        // SAFETY: the set was created by this NVML and not freed; `data` is valid for writes, and all zeros are a
        // valid nvmlEventData_t.
        let data = unsafe {
            nvml_try(call(self.set, data.as_mut_ptr(), timeout_ms))?;
            data.assume_init()
        };
        let instance = |id: u32| (names_instances && id != u32::MAX).then_some(id);
        Ok(RawEvent {
            device: data.device.addr(),
            kind: data.eventType,
            data: data.eventData,
            gi: instance(data.gpuInstanceId),
            ci: instance(data.computeInstanceId),
        })
    }
}

impl Drop for NvmlEventSet {
    fn drop(&mut self) {
        if let Ok(call) = &self.nvml.lib().nvmlEventSetFree {
            // SAFETY: the set was created by this NVML, is freed once, and NVML is initialized while `nvml` lives.
            // A failure leaves nothing to do.
            let _ = unsafe { call(self.set) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_first_drivers_of_535_have_large_processes() {
        for (version, expected) in [
            ("535.43.02", true),
            ("535.86.10", true),
            ("535.42", false),
            ("535.98", false),
            ("535.104.05", false),
            ("550.54.15", false),
            ("", false),
        ] {
            assert_eq!(has_large_processes(version), expected, "{version}");
        }
    }

    #[test]
    fn a_list_that_grows_while_it_is_read_is_read_again() {
        let length = std::cell::Cell::new(3_u32);
        let read = filled(|count: *mut u32, to: *mut u32| {
            // SAFETY: `filled` passes a count and an array with room for it.
            unsafe {
                let room = count.replace(length.get());
                if room < length.get() {
                    // Ten processes start after the first two calls.
                    length.set(if room == 0 { 13 } else { length.get() });
                    return sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;
                }
                (0..length.get()).for_each(|index| to.add(index as usize).write(index));
            }
            sys::nvmlReturn_enum_NVML_SUCCESS
        });
        assert_eq!(read.ok(), Some((0..13).collect()));
    }

    /// Bytes that are not UTF-8 are replaced.
    #[test]
    fn a_name_ends_at_the_first_zero() {
        assert_eq!(text(b"NVIDIA A100\0rest"), "NVIDIA A100");
        assert_eq!(text(b"NVIDIA \xff\xfeA100\0"), "NVIDIA \u{fffd}\u{fffd}A100");
        assert_eq!(text(b"no end"), "no end");
        assert_eq!(text(b""), "");
    }
}
