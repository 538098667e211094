//! Symbols for the processes on a GPU, in NVML's three layouts.

use std::ffi::c_uint;

use nvml_wrapper_sys::bindings as ffi;

use super::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, answer, mig};

const MIB: u64 = 1 << 20;
/// The value for "no MIG instance".
const NONE: c_uint = c_uint::MAX;

/// Fill the caller's array. On input `count` is the array's capacity; on output it is the number of values.
///
/// # Safety
/// `count` is null or valid, and `to` is null or has room for `*count` values.
pub(super) unsafe fn put_list<T>(count: *mut c_uint, to: *mut T, list: Vec<T>) -> Result<(), ffi::nvmlReturn_t> {
    if count.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, valid by this function's contract.
    let room = unsafe { count.replace(list.len() as c_uint) } as usize;
    if list.len() > room {
        return Err(INSUFFICIENT_SIZE);
    }
    if to.is_null() && !list.is_empty() {
        return Err(INVALID_ARGUMENT);
    }
    for (i, value) in list.into_iter().enumerate() {
        // SAFETY: `i` is below the room that this function's contract promises.
        unsafe { to.add(i).write(value) };
    }
    Ok(())
}

/// Return the clients of MPS, or all other processes. The real driver may list clients as compute processes as well; a reader must cope with
/// both.
fn compute<T>(device: ffi::nvmlDevice_t, mps: bool, layout: impl Fn(u32, u64) -> T) -> Result<Vec<T>, ffi::nvmlReturn_t> {
    mig::call_with_part(device, |inner, card, index, mig| {
        let processes = inner.processes(card, index, mig)?.into_iter();
        Ok(processes
            .filter(|(pid, _)| inner.is_mps_client(index, *pid) == mps && inner.renders(index, *pid) != Some(false))
            .map(|(pid, used)| layout(pid, used.saturating_mul(MIB)))
            .collect())
    })
}

fn v1(pid: u32, used: u64) -> ffi::nvmlProcessInfo_v1_t {
    ffi::nvmlProcessInfo_v1_t {
        pid,
        usedGpuMemory: used,
    }
}

fn v2(pid: u32, used: u64) -> ffi::nvmlProcessInfo_v2_t {
    ffi::nvmlProcessInfo_v2_t {
        pid,
        usedGpuMemory: used,
        gpuInstanceId: NONE,
        computeInstanceId: NONE,
    }
}

/// An element of the third version of the lists in the first drivers of 535.
#[repr(C)]
struct LargeProcess {
    common: ffi::nvmlProcessInfo_v2_t,
    /// `usedGpuCcProtectedMemory`.
    protected: u64,
}

/// Fill the caller's array with a list of the third version, whose elements are larger in drivers from 535.43 to 535.86 than nvml.h says
/// (<https://github.com/XuehaiPan/nvitop/pull/89>).
///
/// # Safety
/// As of [`put_list`], with the elements of the driver.
unsafe fn put_third(
    count: *mut c_uint,
    to: *mut ffi::nvmlProcessInfo_t,
    list: Vec<ffi::nvmlProcessInfo_v2_t>,
) -> Result<(), ffi::nvmlReturn_t> {
    let is_large = super::machine_call(|machine| {
        let mut numbers = machine.driver.split('.').map(str::parse::<u32>);
        Ok(matches!((numbers.next(), numbers.next()), (Some(Ok(535)), Some(Ok(43..=86)))))
    })?;
    // SAFETY: this function's contract.
    unsafe {
        if is_large {
            let large = list.into_iter().map(|common| LargeProcess { common, protected: 0 });
            put_list(count, to.cast(), large.collect())
        } else {
            put_list(count, to, list)
        }
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_v1_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_list(count, infos, compute(device, false, v1)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v2(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_v2_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_list(count, infos, compute(device, false, v2)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_third(count, infos, compute(device, false, v2)?) })
}

/// Return the processes that render.
fn graphics<T>(device: ffi::nvmlDevice_t, layout: impl Fn(u32, u64) -> T) -> Result<Vec<T>, ffi::nvmlReturn_t> {
    mig::call_with_part(device, |inner, card, index, mig| {
        let processes = inner.processes(card, index, mig)?.into_iter();
        Ok(processes
            .filter(|(pid, _)| inner.renders(index, *pid).is_some())
            .map(|(pid, used)| layout(pid, used.saturating_mul(MIB)))
            .collect())
    })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_v1_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_list(count, infos, graphics(device, v1)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v2(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_v2_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_list(count, infos, graphics(device, v2)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_third(count, infos, graphics(device, v2)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_v1_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_list(count, infos, compute(device, true, v1)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v2(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_v2_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_list(count, infos, compute(device, true, v2)?) })
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    device: ffi::nvmlDevice_t,
    count: *mut c_uint,
    infos: *mut ffi::nvmlProcessInfo_t,
) -> ffi::nvmlReturn_t {
    // SAFETY: the caller's count and array.
    answer(|| unsafe { put_third(count, infos, compute(device, true, v2)?) })
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    #[test]
    fn a_list_says_its_length_first_and_fills_no_more_than_fits() {
        let list = || vec![v2(1, MIB), v2(2, MIB)];
        let mut count = 0;
        // SAFETY: a null array with a count of 0.
        let asked = unsafe { put_list(&raw mut count, ptr::null_mut(), list()) };
        assert_eq!(asked, Err(INSUFFICIENT_SIZE));
        assert_eq!(count, 2);
        let mut room = [v2(0, 0); 3];
        count = 3;
        // SAFETY: the array has the capacity that the count names.
        assert_eq!(unsafe { put_list(&raw mut count, room.as_mut_ptr(), list()) }, Ok(()));
        assert_eq!((count, room.map(|process| process.pid)), (2, [1, 2, 0]));
        // SAFETY: a null count is refused, not dereferenced.
        let no_count = unsafe { put_list(ptr::null_mut(), room.as_mut_ptr(), list()) };
        // SAFETY: a null array is refused, not dereferenced.
        let no_array = unsafe { put_list(&raw mut count, ptr::null_mut(), list()) };
        assert_eq!((no_count, no_array), (Err(INVALID_ARGUMENT), Err(INVALID_ARGUMENT)));
    }
}
