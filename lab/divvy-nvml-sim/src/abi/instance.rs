//! Symbols for GPU instances and compute instances of MIG (nvml.h, "Multi Instance GPU Management").
//!
//! [`divvy_gpu_sim::mig`] says which profile an instance has.

use std::ffi::c_uint;

use divvy_gpu_sim::mig::{PROFILES, Profile, SMS_OF_SLICE};
use nvml_wrapper_sys::bindings as ffi;

use super::{INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer, device_call, handle_of, mig, put};
use crate::machine::{NvmlCard, SimMigDevice};
use crate::sim::NvmlFailure;

/// The numbers of the profiles of compute instances, by their slices (`NVML_COMPUTE_INSTANCE_PROFILE_…`). A profile's id is its number.
const COMPUTE_PROFILES: [(u32, u32); 5] = [(1, 0), (2, 1), (3, 2), (4, 3), (7, 4)];
/// The number of profiles that a program may ask for. It is higher than in today's nvml.h.
const NUMBERS: u32 = 32;

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

fn within(card: &NvmlCard, gpu_instance: u32) -> impl Iterator<Item = &SimMigDevice> {
    card.mig.iter().filter(move |device| device.gpu_instance == gpu_instance)
}

/// Return the profile of a GPU instance as the description names it.
fn named(card: &NvmlCard, gpu_instance: u32) -> Option<u32> {
    within(card, gpu_instance).find_map(|device| device.profile)
}

/// Return the profile of a GPU instance.
fn profile_of(card: &NvmlCard, gpu_instance: u32) -> Result<Profile, NvmlFailure> {
    let compute_instances = within(card, gpu_instance).count();
    Profile::of(named(card, gpu_instance), compute_instances).ok_or(NOT_FOUND)
}

/// Return the number of slices of the compute instances in a GPU instance.
fn compute_slices(card: &NvmlCard, gpu_instance: u32) -> Result<u32, NvmlFailure> {
    Ok(profile_of(card, gpu_instance)?.compute_slices(named(card, gpu_instance)))
}

fn compute_profile(slices: u32) -> Result<u32, NvmlFailure> {
    let found = COMPUTE_PROFILES.iter().find(|(of, _)| *of == slices);
    found.map(|(_, number)| *number).ok_or(NOT_FOUND)
}

fn memory(card: &NvmlCard, profile: Profile) -> u64 {
    profile.memory_mib(card.described.memory_mib)
}

/// Return the memory of a MIG device in MiB.
pub(super) fn memory_of(card: &NvmlCard, device: &SimMigDevice) -> Result<u64, NvmlFailure> {
    Ok(memory(card, profile_of(card, device.gpu_instance)?))
}

/// Run a call that concerns an existing GPU instance.
fn instance_call(
    instance: usize,
    work: impl FnOnce(&NvmlCard, usize, u32, Option<u32>) -> Result<(), NvmlFailure>,
) -> Result<(), NvmlFailure> {
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
            let profile = profile_of(card, mig.gpu_instance)?;
            let slices = compute_slices(card, mig.gpu_instance)?;
            let found = ffi::nvmlDeviceAttributes_t {
                multiprocessorCount: SMS_OF_SLICE * slices,
                sharedCopyEngineCount: profile.copy_engines,
                sharedDecoderCount: profile.decoders,
                sharedEncoderCount: 0,
                sharedJpegCount: profile.media,
                sharedOfaCount: profile.media,
                gpuInstanceSliceCount: profile.slices,
                computeInstanceSliceCount: slices,
                memorySizeMB: memory(card, profile),
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(attributes, found) }
        })
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetAttributes(
    device: ffi::nvmlDevice_t,
    attributes: *mut ffi::nvmlDeviceAttributes_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the same contract.
    unsafe { nvmlDeviceGetAttributes_v2(device, attributes) }
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
            let profile = profile_of(card, id)?;
            let found = ffi::nvmlGpuInstanceInfo_t {
                device: handle_of(own),
                id,
                profileId: profile.id,
                placement: ffi::nvmlGpuInstancePlacement_t {
                    start: 0,
                    size: profile.slices,
                },
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
            if !card.is_mig_capable() {
                return Err(NOT_SUPPORTED);
            }
            if profile >= NUMBERS {
                return Err(INVALID_ARGUMENT);
            }
            let asked = PROFILES.into_iter().find(|known| known.number == profile);
            let profile = asked.ok_or(NOT_SUPPORTED)?;
            let found = ffi::nvmlGpuInstanceProfileInfo_t {
                id: profile.id,
                isP2pSupported: 0,
                sliceCount: profile.slices,
                instanceCount: 7 / profile.slices,
                multiprocessorCount: SMS_OF_SLICE * profile.slices,
                copyEngineCount: profile.copy_engines,
                decoderCount: profile.decoders,
                encoderCount: 0,
                jpegCount: profile.media,
                ofaCount: profile.media,
                memorySizeMB: memory(card, profile),
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
        instance_call(compute.addr(), |card, own, of, id| {
            let slices = compute_slices(card, of)?;
            let found = ffi::nvmlComputeInstanceInfo_t {
                device: handle_of(own),
                gpuInstance: gpu_instance(own, of),
                id: id.ok_or(INVALID_ARGUMENT)?,
                profileId: compute_profile(slices)?,
                placement: ffi::nvmlComputeInstancePlacement_t { start: 0, size: slices },
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
            let slices = compute_slices(card, gpu_instance)?;
            if profile != compute_profile(slices)? {
                return Err(NOT_SUPPORTED);
            }
            let of = profile_of(card, gpu_instance)?;
            let found = ffi::nvmlComputeInstanceProfileInfo_t {
                id: profile,
                sliceCount: slices,
                instanceCount: of.slices / slices,
                multiprocessorCount: SMS_OF_SLICE * slices,
                sharedCopyEngineCount: of.copy_engines,
                sharedDecoderCount: of.decoders,
                sharedEncoderCount: 0,
                sharedJpegCount: of.media,
                sharedOfaCount: of.media,
            };
            // SAFETY: the caller's out parameter.
            unsafe { put(info, found) }
        })
    })
}
