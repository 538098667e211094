//! Symbols for GPU instances and compute instances of MIG (nvml.h, "Multi Instance GPU Management").
//!
//! The machine description lists the instances without their sizes. Each compute instance has one slice, and a GPU instance has the smallest
//! profile with enough slices for its compute instances. The profile ids are those of an A100.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer, device_call, handle_of, mig, put};
use crate::machine::{Card, MigDevice};
use crate::sim::Code;

/// The profiles of GPU instances, indexed by profile number: the number of slices, and the profile id that an instance reports.
const PROFILES: [(u32, u32); 5] = [(1, 19), (2, 14), (3, 9), (4, 5), (7, 0)];
/// The profile of a compute instance with one slice.
const ONE_SLICE: c_uint = ffi::NVML_COMPUTE_INSTANCE_PROFILE_1_SLICE;
/// The number of memory slices of a GPU.
const SLICES: u64 = 8;

/// Split a handle into the GPU, the GPU instance, and the compute instance. A handle is never dereferenced. From the lowest bits on, it contains
/// these three numbers, each plus 1; the compute instance is 0 in the handle of a GPU instance.
fn place_of(handle: usize) -> Option<(usize, u32, Option<u32>)> {
    let card = (handle % mig::FIRST).checked_sub(1)?;
    let instances = handle / mig::FIRST;
    let gpu_instance = u32::try_from((instances % mig::FIRST).checked_sub(1)?).ok()?;
    let compute_instance = u32::try_from(instances / mig::FIRST).ok()?.checked_sub(1);
    Some((card, gpu_instance, compute_instance))
}

fn gpu_instance(card: usize, id: u32) -> ffi::nvmlGpuInstance_t {
    std::ptr::without_provenance_mut((id as usize + 1) * mig::FIRST + card + 1)
}

fn compute_instance(card: usize, gpu_instance: u32, id: u32) -> ffi::nvmlComputeInstance_t {
    let of_gpu = (gpu_instance as usize + 1) * mig::FIRST + card + 1;
    std::ptr::without_provenance_mut((id as usize + 1) * mig::FIRST * mig::FIRST + of_gpu)
}

fn within(card: &Card, gpu_instance: u32) -> impl Iterator<Item = &MigDevice> {
    card.mig.iter().filter(move |device| device.gpu_instance == gpu_instance)
}

/// Return the profile of a GPU instance: its number, its slices, and its id in [`PROFILES`].
fn profile_of(card: &Card, gpu_instance: u32) -> Result<(u32, u32, u32), Code> {
    let slices = within(card, gpu_instance).count();
    let found = (0..)
        .zip(PROFILES)
        .find(|(_, (most, _))| slices > 0 && *most as usize >= slices);
    found.map(|(number, (slices, id))| (number, slices, id)).ok_or(NOT_FOUND)
}

fn memory(card: &Card, slices: u32) -> u64 {
    card.described.memory_mib / SLICES * u64::from(slices)
}

/// Run a call that concerns an existing GPU instance.
fn instance_call(instance: usize, work: impl FnOnce(&Card, usize, u32, Option<u32>) -> Result<(), Code>) -> Result<(), Code> {
    let (index, gpu_instance, compute_instance) = place_of(instance).ok_or(INVALID_ARGUMENT)?;
    device_call(handle_of(index), |_, card, own| {
        within(card, gpu_instance).next().ok_or(INVALID_ARGUMENT)?;
        work(card, own, gpu_instance, compute_instance)
    })
}

/// As in a real driver, only MIG devices support this.
#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetAttributes_v2(
    device: ffi::nvmlDevice_t,
    attributes: *mut ffi::nvmlDeviceAttributes_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        if !mig::is(device) {
            return device_call(device, |_, _, _| Err(NOT_SUPPORTED));
        }
        mig::call_with_card(device, |card, mig| {
            let (_, slices, _) = profile_of(card, mig.gpu_instance)?;
            let found = ffi::nvmlDeviceAttributes_t {
                multiprocessorCount: 0,
                sharedCopyEngineCount: 0,
                sharedDecoderCount: 0,
                sharedEncoderCount: 0,
                sharedJpegCount: 0,
                sharedOfaCount: 0,
                gpuInstanceSliceCount: slices,
                computeInstanceSliceCount: 1,
                memorySizeMB: memory(card, slices),
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(attributes, found) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceById(
    device: ffi::nvmlDevice_t,
    id: c_uint,
    instance: *mut ffi::nvmlGpuInstance_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, own| {
            within(card, id).next().ok_or(NOT_FOUND)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(instance, gpu_instance(own, id)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetInfo(
    instance: ffi::nvmlGpuInstance_t,
    info: *mut ffi::nvmlGpuInstanceInfo_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        instance_call(instance.addr(), |card, own, id, _| {
            let (_, slices, profile) = profile_of(card, id)?;
            let found = ffi::nvmlGpuInstanceInfo_t {
                device: handle_of(own),
                id,
                profileId: profile,
                placement: ffi::nvmlGpuInstancePlacement_t { start: 0, size: slices },
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(info, found) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGpuInstanceProfileInfo(
    device: ffi::nvmlDevice_t,
    profile: c_uint,
    info: *mut ffi::nvmlGpuInstanceProfileInfo_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        device_call(device, |_, card, _| {
            if card.described.mig.is_none() {
                return Err(NOT_SUPPORTED);
            }
            if profile >= ffi::NVML_GPU_INSTANCE_PROFILE_COUNT {
                return Err(INVALID_ARGUMENT);
            }
            let (slices, id) = *PROFILES.get(profile as usize).ok_or(NOT_SUPPORTED)?;
            let found = ffi::nvmlGpuInstanceProfileInfo_t {
                id,
                isP2pSupported: 0,
                sliceCount: slices,
                instanceCount: 7 / slices,
                multiprocessorCount: 0,
                copyEngineCount: 0,
                decoderCount: 0,
                encoderCount: 0,
                jpegCount: 0,
                ofaCount: 0,
                memorySizeMB: memory(card, slices),
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(info, found) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceById(
    instance: ffi::nvmlGpuInstance_t,
    id: c_uint,
    compute: *mut ffi::nvmlComputeInstance_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        instance_call(instance.addr(), |card, own, gpu_instance, _| {
            let mut there = within(card, gpu_instance).map(|device| device.compute_instance);
            there.find(|there| *there == id).ok_or(NOT_FOUND)?;
            // SAFETY: the caller's out parameter.
            unsafe { put(compute, compute_instance(own, gpu_instance, id)) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlComputeInstanceGetInfo_v2(
    compute: ffi::nvmlComputeInstance_t,
    info: *mut ffi::nvmlComputeInstanceInfo_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        instance_call(compute.addr(), |_, own, of, id| {
            let found = ffi::nvmlComputeInstanceInfo_t {
                device: handle_of(own),
                gpuInstance: gpu_instance(own, of),
                id: id.ok_or(INVALID_ARGUMENT)?,
                profileId: ONE_SLICE,
                placement: ffi::nvmlComputeInstancePlacement_t { start: 0, size: 1 },
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(info, found) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlGpuInstanceGetComputeInstanceProfileInfo(
    instance: ffi::nvmlGpuInstance_t,
    profile: c_uint,
    engines: c_uint,
    info: *mut ffi::nvmlComputeInstanceProfileInfo_t,
) -> ffi::nvmlReturn_t {
    answer(|| {
        instance_call(instance.addr(), |card, _, gpu_instance, _| {
            if profile >= ffi::NVML_COMPUTE_INSTANCE_PROFILE_COUNT || engines != 0 {
                return Err(INVALID_ARGUMENT);
            }
            if profile != ONE_SLICE {
                return Err(NOT_SUPPORTED);
            }
            let (_, slices, _) = profile_of(card, gpu_instance)?;
            let found = ffi::nvmlComputeInstanceProfileInfo_t {
                id: ONE_SLICE,
                sliceCount: 1,
                instanceCount: slices,
                multiprocessorCount: 0,
                sharedCopyEngineCount: 0,
                sharedDecoderCount: 0,
                sharedEncoderCount: 0,
                sharedJpegCount: 0,
                sharedOfaCount: 0,
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(info, found) }
        })
    })
}
