//! NVML's symbols. Each call passes the gate of [`crate::sim`], and no panic leaves a symbol.

mod cuda;
mod device;
mod event;
mod export_table;
mod gauges;
mod gpm;
mod health;
mod instance;
mod limits;
mod mig;
mod process;
mod system;
mod topology;
mod unsupported;
mod utilization;

use std::ffi::{CStr, c_char, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nvml_wrapper_sys::bindings as ffi;

use crate::machine::{NvmlCard, NvmlMachine};
use crate::sim::{NvmlFailure, NvmlSimState, sim};

const INVALID_ARGUMENT: NvmlFailure = ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_SUPPORTED: NvmlFailure = ffi::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const NOT_FOUND: NvmlFailure = ffi::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const INSUFFICIENT_SIZE: NvmlFailure = ffi::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;

/// Run a symbol's body and return its code. A panic becomes NVML_ERROR_UNKNOWN, because unwinding into C is undefined behavior.
fn answer(body: impl FnOnce() -> Result<(), NvmlFailure>) -> ffi::nvmlReturn_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ffi::nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => ffi::nvmlReturn_enum_NVML_ERROR_UNKNOWN,
    }
}

/// Run a call that concerns the whole machine.
fn machine_call<T>(work: impl FnOnce(&NvmlMachine) -> Result<T, NvmlFailure>) -> Result<T, NvmlFailure> {
    sim().call(|_, machine| work(machine))
}

/// Run a call that concerns one GPU. Fail if the GPU is lost.
fn device_call<T>(
    device: ffi::nvmlDevice_t,
    work: impl FnOnce(&NvmlSimState, &NvmlCard, usize) -> Result<T, NvmlFailure>,
) -> Result<T, NvmlFailure> {
    let index = index_of(device)?;
    sim().call(|inner, machine| {
        let card = inner.present(machine, index)?;
        work(inner, card, index)
    })
}

/// Return the handle of a GPU. A handle is never dereferenced: it is the index plus 1, because NULL is not a device. For MIG devices see [`mig`].
fn handle_of(index: usize) -> ffi::nvmlDevice_t {
    std::ptr::without_provenance_mut(index + 1)
}

/// Return the index of a GPU's handle. As in NVML, a MIG device's handle is an invalid argument for calls that concern a GPU.
fn index_of(device: ffi::nvmlDevice_t) -> Result<usize, NvmlFailure> {
    device
        .addr()
        .checked_sub(1)
        .filter(|index| *index < mig::FIRST)
        .ok_or(INVALID_ARGUMENT)
}

/// Write a value through the caller's pointer.
///
/// # Safety
/// `to` is null or valid for a write of `T`.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), NvmlFailure> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and valid by this function's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Write a C string into the caller's buffer.
///
/// # Safety
/// `to` is null or valid for writes of `length` bytes.
unsafe fn put_text(to: *mut c_char, length: c_uint, text: &str) -> Result<(), NvmlFailure> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and its terminator fit into the `length` bytes that this function's contract promises, and a
    // fresh Rust string does not overlap them.
    unsafe {
        to.copy_from_nonoverlapping(text.as_ptr().cast(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Read the caller's string.
///
/// # Safety
/// `from` is null or a terminated C string.
unsafe fn get_text<'a>(from: *const c_char) -> Result<&'a str, NvmlFailure> {
    if from.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and terminated by this function's contract.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

/// Convert a text into a C string of fixed size. A longer text is cut off; the rest is zero.
fn field<const N: usize>(text: &str) -> [c_char; N] {
    let mut out = [0; N];
    for (to, from) in out.iter_mut().take(N - 1).zip(text.bytes()) {
        *to = from as c_char;
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_that_does_not_fit_with_its_end_is_refused() {
        let mut buffer = [1; 8];
        let mut put = |length, text: &str| {
            // SAFETY: the buffer has at least `length` bytes.
            let result = unsafe { put_text(buffer.as_mut_ptr(), length, text) };
            (result, buffer)
        };
        assert_eq!(put(4, "four"), (Err(INSUFFICIENT_SIZE), [1; 8]));
        let (result, buffer) = put(5, "four");
        assert_eq!((result, buffer[4], buffer[5]), (Ok(()), 0, 1));
    }

    #[test]
    fn before_nvml_init_every_call_says_so() {
        let uninitialized = Err(ffi::nvmlReturn_enum_NVML_ERROR_UNINITIALIZED);
        assert_eq!(machine_call(|_| Ok(())), uninitialized);
        assert_eq!(device_call(handle_of(0), |_, _, _| Ok(())), uninitialized);
        assert_eq!(device_call(std::ptr::null_mut(), |_, _, _| Ok(())), Err(INVALID_ARGUMENT));
    }
}
