//! The pointers that programs pass. Values of these types exist only as parameters of symbols: cuda.h makes the caller promise that each is NULL, or
//! valid for what the type is for until the call returns.

use std::ffi::{CStr, c_char, c_void};

use crate::codes::{Code, INVALID_VALUE};

/// Where a result goes.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Check that the pointer is not NULL. A symbol does this before it changes anything.
    pub(super) fn present(self) -> Result<(), Code> {
        match self.0.is_null() {
            true => Err(INVALID_VALUE),
            false => Ok(()),
        }
    }

    /// Write a result.
    pub(super) fn put(self, value: T) -> Result<(), Code> {
        self.present()?;
        // SAFETY: not NULL, and so valid for a write by the caller's promise. C programs may pass unaligned pointers.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Write a result, unless the pointer is NULL.
    pub(super) fn put_if_present(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: as in `put`.
            unsafe { self.0.write_unaligned(value) };
        }
    }
}

impl Out<c_char> {
    /// Write a text into the caller's buffer of this length. A longer text is cut off.
    pub(super) fn put_text(self, length: i32, text: &str) -> Result<(), Code> {
        self.present()?;
        let room = usize::try_from(length)
            .ok()
            .and_then(|length| length.checked_sub(1))
            .ok_or(INVALID_VALUE)?;
        let taken = text.len().min(room);
        // SAFETY: the text that is taken and its end are at most the `length` bytes that the caller promises, and a Rust string does not overlap
        // them.
        unsafe {
            self.0.copy_from_nonoverlapping(text.as_ptr().cast(), taken);
            self.0.add(taken).write(0);
        }
        Ok(())
    }
}

/// Where a value or an array comes from.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// Read the value. NULL is an error.
    pub(super) fn get(self) -> Result<T, Code> {
        self.at(0)
    }

    /// Read a value of the array, whose length the caller has told to be greater than the index.
    pub(super) fn at(self, index: u32) -> Result<T, Code> {
        match self.0.is_null() {
            true => Err(INVALID_VALUE),
            // SAFETY: not NULL, and so valid for a read of this element by the caller's promise.
            false => Ok(unsafe { self.0.add(index as usize).read_unaligned() }),
        }
    }
}

/// A value that is read and replaced.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct InOut<T>(Out<T>);

impl<T: Copy> InOut<T> {
    /// Read the value.
    pub(super) fn get(self) -> Result<T, Code> {
        In(self.0.0.cast_const()).get()
    }

    /// Replace the value.
    pub(super) fn put(self, value: T) -> Result<(), Code> {
        self.0.put(value)
    }
}

/// A value whose type another parameter tells.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Untyped(*mut c_void);

impl Untyped {
    /// Read the value as the type that the other parameter has told.
    pub(super) fn read<T: Copy>(self) -> Result<T, Code> {
        In(self.0.cast_const().cast()).get()
    }

    /// Write the value as the type that the other parameter has told.
    pub(super) fn write<T: Copy>(self, value: T) -> Result<(), Code> {
        Out(self.0.cast()).put(value)
    }
}

/// Main memory, whose length another parameter tells.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Bytes(*mut u8);

impl Bytes {
    /// Check that there is memory if there has to be some.
    pub(super) fn present(self, length: u64) -> Result<(), Code> {
        match length > 0 && self.0.is_null() {
            true => Err(INVALID_VALUE),
            false => Ok(()),
        }
    }

    /// Fill with zeros.
    pub(super) fn clear(self, length: u64) -> Result<(), Code> {
        self.present(length)?;
        if length > 0 {
            // SAFETY: not NULL, and so valid for writes of this length by the caller's promise.
            unsafe { self.0.write_bytes(0, length as usize) };
        }
        Ok(())
    }
}

/// A text that ends with a zero byte.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Text(*const c_char);

impl Text {
    /// Read the text.
    pub(super) fn get<'a>(self) -> Result<&'a str, Code> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not NULL, and so terminated by the caller's promise. The symbols use it only until they return.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| INVALID_VALUE)
    }
}
