//! The symbol for how busy each process keeps a GPU.

use std::ffi::{c_uint, c_ulonglong};

use nvml_wrapper_sys::bindings as ffi;

use super::process::put_list;
use super::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND, NOT_SUPPORTED, answer, mig};
use crate::sim::NvmlFailure;

/// The first compute capability of Maxwell. "For Maxwell or newer fully supported devices" (nvml.h).
const MAXWELL: u32 = 5;

type ProcessSample = ffi::nvmlProcessUtilizationSample_t;

fn samples(device: ffi::nvmlDevice_t, since: u64) -> Result<Vec<ProcessSample>, NvmlFailure> {
    mig::call_with_part(device, |inner, card, index, part| {
        // "On MIG-enabled GPUs, querying process utilization is not currently supported" (nvml.h).
        if part.is_some() || card.described.mig.is_some() || card.cc.0 < MAXWELL {
            return Err(NOT_SUPPORTED);
        }
        let samples = inner.samples(card, index, since)?.into_iter().map(|of| ProcessSample {
            pid: of.pid,
            timeStamp: of.at,
            smUtil: of.percent,
            memUtil: 0,
            encUtil: 0,
            decUtil: 0,
        });
        Ok(samples.collect())
    })
}

/// Write the samples into the caller's array. Without an array, or with one that is too small, say how many there are.
///
/// # Safety
/// `count` is null or valid, and `to` is null or has room for `*count` samples.
unsafe fn put_samples(samples: Vec<ProcessSample>, to: *mut ProcessSample, count: *mut c_uint) -> Result<(), NvmlFailure> {
    if samples.is_empty() {
        return Err(NOT_FOUND);
    }
    if to.is_null() && !count.is_null() {
        // SAFETY: not null, so valid by this function's contract.
        unsafe { count.write(samples.len() as c_uint) };
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: this function's contract.
    unsafe { put_list(count, to, samples) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetProcessUtilization(
    device: ffi::nvmlDevice_t,
    utilization: *mut ProcessSample,
    count: *mut c_uint,
    since: c_ulonglong,
) -> ffi::nvmlReturn_t {
    answer(|| {
        if count.is_null() {
            return Err(INVALID_ARGUMENT);
        }
        // SAFETY: the caller's array and count.
        unsafe { put_samples(samples(device, since)?, utilization, count) }
    })
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn sample(pid: u32) -> ProcessSample {
        ProcessSample {
            pid,
            timeStamp: 0,
            smUtil: 0,
            memUtil: 0,
            encUtil: 0,
            decUtil: 0,
        }
    }

    #[test]
    fn the_caller_first_learns_the_number_of_samples() {
        let mut room = [sample(0); 3];
        let mut put = |list: &[u32], has_array: bool, mut count: c_uint| {
            let to = if has_array { room.as_mut_ptr() } else { ptr::null_mut() };
            let list = list.iter().map(|pid| sample(*pid)).collect();
            // SAFETY: null, or an array of 3, which no count exceeds.
            let result = unsafe { put_samples(list, to, &raw mut count) };
            (result, count, room.map(|sample| sample.pid))
        };
        assert_eq!(put(&[1, 2], false, 9), (Err(INSUFFICIENT_SIZE), 2, [0; 3]));
        assert_eq!(put(&[1, 2], true, 1), (Err(INSUFFICIENT_SIZE), 2, [0; 3]));
        assert_eq!(put(&[1, 2], true, 3), (Ok(()), 2, [1, 2, 0]));
        assert_eq!(put(&[], true, 3).0, Err(NOT_FOUND));
        assert_eq!(put(&[], false, 0).0, Err(NOT_FOUND));
    }
}
