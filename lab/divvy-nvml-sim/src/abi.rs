//! NVML's symbols. Each one passes the gate of [`crate::sim`], and no panic leaves it.

mod device;
mod event;
mod instance;
mod mig;
mod process;
mod system;
mod topology;

use std::ffi::{CStr, c_char, c_uint};
use std::panic::{AssertUnwindSafe, catch_unwind};

use nvml_wrapper_sys::bindings as ffi;

use crate::machine::{Card, Machine};
use crate::sim::{Code, Inner, sim};

const INVALID_ARGUMENT: Code = ffi::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT;
const NOT_SUPPORTED: Code = ffi::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED;
const NOT_FOUND: Code = ffi::nvmlReturn_enum_NVML_ERROR_NOT_FOUND;
const INSUFFICIENT_SIZE: Code = ffi::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_SIZE;

/// Runs a symbol's body: a panic becomes NVML_ERROR_UNKNOWN, since unwinding into C is not defined.
fn answer(body: impl FnOnce() -> Result<(), Code>) -> ffi::nvmlReturn_t {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => ffi::nvmlReturn_enum_NVML_SUCCESS,
        Ok(Err(code)) => code,
        Err(_) => ffi::nvmlReturn_enum_NVML_ERROR_UNKNOWN,
    }
}

/// A call about the whole machine.
fn machine_call<T>(work: impl FnOnce(&Machine) -> Result<T, Code>) -> Result<T, Code> {
    sim().call(|_, machine| work(machine))
}

/// A call about one GPU that is not lost.
fn device_call<T>(device: ffi::nvmlDevice_t, work: impl FnOnce(&Inner, &Card, usize) -> Result<T, Code>) -> Result<T, Code> {
    let index = index_of(device)?;
    sim().call(|inner, machine| {
        let card = inner.present(machine, index)?;
        work(inner, card, index)
    })
}

/// Handles are never followed: they are the index, counted from 1 since NULL is no device. Those of MIG devices are in [`mig`].
fn handle_of(index: usize) -> ffi::nvmlDevice_t {
    std::ptr::without_provenance_mut(index + 1)
}

/// Of a GPU. What asks a MIG device for what it has of its GPU is told, as by NVML, that this handle is none for it.
fn index_of(device: ffi::nvmlDevice_t) -> Result<usize, Code> {
    device
        .addr()
        .checked_sub(1)
        .filter(|index| *index < mig::FIRST)
        .ok_or(INVALID_ARGUMENT)
}

/// Writes an answer through the caller's pointer.
///
/// # Safety
/// `to` is null or valid for a write of `T`.
unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and valid by this function's contract.
    unsafe { to.write(value) };
    Ok(())
}

/// Writes a C string into the caller's buffer.
///
/// # Safety
/// `to` is null or valid for writes of `length` bytes.
unsafe fn put_text(to: *mut c_char, length: c_uint, text: &str) -> Result<(), Code> {
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

/// Reads a caller's string.
///
/// # Safety
/// `from` is null or a terminated C string.
unsafe fn get_text<'a>(from: *const c_char) -> Result<&'a str, Code> {
    if from.is_null() {
        return Err(INVALID_ARGUMENT);
    }
    // SAFETY: not null, and terminated by this function's contract.
    unsafe { CStr::from_ptr(from) }.to_str().map_err(|_| INVALID_ARGUMENT)
}

/// Fills a field of fixed size; the rest is zero.
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
