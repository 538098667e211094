//! The pointers that programs pass. Values of these types exist only as parameters of symbols: cuda.h makes the caller promise that each is NULL, or
//! valid for what the type is for until the call returns.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::{NonNull, null, with_exposed_provenance, with_exposed_provenance_mut};

use divvy_ptx::Kernel;

use crate::codes::{CuCode, INVALID_VALUE};

/// Where a result goes.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// Check that the pointer is not NULL. A symbol does this before it changes anything.
    pub(super) fn present(self) -> Result<(), CuCode> {
        if self.0.is_null() { Err(INVALID_VALUE) } else { Ok(()) }
    }

    /// Write a result.
    pub(super) fn put(self, value: T) -> Result<(), CuCode> {
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
    pub(super) fn put_text(self, length: i32, text: &str) -> Result<(), CuCode> {
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
    pub(super) fn get(self) -> Result<T, CuCode> {
        self.at(0)
    }

    /// Read a value of the array, whose length the caller has told to be greater than the index.
    pub(super) fn at(self, index: u32) -> Result<T, CuCode> {
        if self.0.is_null() {
            Err(INVALID_VALUE)
        } else {
            // SAFETY: not NULL, and so valid for a read of this element by the caller's promise.
            Ok(unsafe { self.0.add(index as usize).read_unaligned() })
        }
    }
}

/// A value that is read and replaced.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct InOut<T>(Out<T>);

impl<T: Copy> InOut<T> {
    /// Read the value.
    pub(super) fn get(self) -> Result<T, CuCode> {
        In(self.0.0.cast_const()).get()
    }

    /// Replace the value.
    pub(super) fn put(self, value: T) -> Result<(), CuCode> {
        self.0.put(value)
    }
}

/// A value whose type another parameter tells.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Untyped(*mut c_void);

impl Untyped {
    /// Read the value as the type that the other parameter has told.
    pub(super) fn read<T: Copy>(self) -> Result<T, CuCode> {
        In(self.0.cast_const().cast()).get()
    }

    /// Write the value as the type that the other parameter has told.
    pub(super) fn write<T: Copy>(self, value: T) -> Result<(), CuCode> {
        Out(self.0.cast()).put(value)
    }
}

/// Main memory, whose length another parameter tells.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct HostBytes(*mut u8);

impl HostBytes {
    /// Check that there is memory if there has to be some.
    pub(super) fn present(self, length: u64) -> Result<(), CuCode> {
        if length > 0 && self.0.is_null() {
            Err(INVALID_VALUE)
        } else {
            Ok(())
        }
    }

    /// Copy from memory of the GPU; `None` has zeros.
    ///
    /// # Safety
    /// There is this much memory.
    pub(super) unsafe fn fill(self, from: Option<NonNull<u8>>, length: u64) -> Result<(), CuCode> {
        self.present(length)?;
        match from {
            _ if length == 0 => {}
            // SAFETY: not NULL, and so valid for writes of this length by the caller's promise.
            None => unsafe { self.0.write_bytes(0, length as usize) },
            // SAFETY: as above; the source is valid by this function's contract. It may be the same memory, if it is main memory.
            Some(from) => unsafe { self.0.copy_from(from.as_ptr(), length as usize) },
        }
        Ok(())
    }

    /// Copy to memory of the GPU.
    ///
    /// # Safety
    /// There is this much memory.
    pub(super) unsafe fn copy(self, to: NonNull<u8>, length: u64) -> Result<(), CuCode> {
        self.present(length)?;
        if length > 0 {
            // SAFETY: as in `fill`, in the other direction.
            unsafe { self.0.copy_to(to.as_ptr(), length as usize) };
        }
        Ok(())
    }
}

/// The parameters of a launch, one pointer each.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct LaunchArguments(*const *const u8);

impl LaunchArguments {
    /// Read as many bytes as each parameter of the kernel has.
    fn bytes(self, kernel: &Kernel) -> Result<Vec<u8>, CuCode> {
        let mut bytes = vec![0; kernel.parameter_bytes()];
        for (index, parameter) in kernel.parameters().iter().enumerate() {
            let from = In(self.0).at(index as u32)?;
            if from.is_null() {
                return Err(INVALID_VALUE);
            }
            let to = &mut bytes[parameter.offset..parameter.offset + parameter.bytes];
            // SAFETY: the caller promises a pointer to a value of the parameter's size for each parameter of the kernel.
            unsafe { from.copy_to_nonoverlapping(to.as_mut_ptr(), to.len()) };
        }
        Ok(bytes)
    }
}

/// The parameters of a launch in the other form: pairs of a name and a value, of which the last name is CU_LAUNCH_PARAM_END.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Extra(*const usize);

/// CU_LAUNCH_PARAM_END, CU_LAUNCH_PARAM_BUFFER_POINTER, and CU_LAUNCH_PARAM_BUFFER_SIZE.
const END: usize = 0;
const BUFFER: usize = 1;
const SIZE: usize = 2;

impl Extra {
    /// A launch that does not use this form.
    pub(super) const NONE: Extra = Extra(null());

    /// Read the buffer. Return `None` if the launch does not use this form.
    fn bytes(self) -> Result<Option<Vec<u8>>, CuCode> {
        if self.0.is_null() {
            return Ok(None);
        }
        let (mut buffer, mut size) = (null::<u8>(), 0_usize);
        for pair in 0.. {
            let value = |index| In(self.0).at(index);
            match value(2 * pair)? {
                END => break,
                BUFFER => buffer = with_exposed_provenance(value(2 * pair + 1)?),
                SIZE => size = In(with_exposed_provenance::<usize>(value(2 * pair + 1)?)).get()?,
                _ => return Err(INVALID_VALUE),
            }
        }
        // No kernel has more parameters than 32,764 bytes (CUDA C++ Programming Guide, "Function Parameters").
        if buffer.is_null() || size > 32_764 {
            return Err(INVALID_VALUE);
        }
        let mut bytes = vec![0; size];
        // SAFETY: the caller promises a buffer of this size.
        unsafe { buffer.copy_to_nonoverlapping(bytes.as_mut_ptr(), size) };
        Ok(Some(bytes))
    }
}

/// Read the parameters of a kernel in the form that the launch uses.
pub(super) fn parameters(kernel: &Kernel, arguments: LaunchArguments, extra: Extra) -> Result<Vec<u8>, CuCode> {
    match extra.bytes()? {
        Some(bytes) if bytes.len() == kernel.parameter_bytes() => Ok(bytes),
        Some(_) => Err(INVALID_VALUE),
        None => arguments.bytes(kernel),
    }
}

/// Code: PTX, or another format.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct CodeImage(*const c_char);

impl CodeImage {
    pub(super) fn present(self) -> Result<(), CuCode> {
        In(self.0).get().map(drop)
    }

    /// Return the text, if it is PTX: a text that ends with a zero byte, and begins with a directive or a comment.
    pub(super) fn ptx<'a>(self) -> Result<Option<&'a str>, CuCode> {
        for index in 0.. {
            // SAFETY: the code is not NULL, and no byte before this one has ended a text. Each other format has more bytes than this before its end,
            // because its first byte is no white space.
            match In(self.0).at(index)? as u8 {
                b' ' | b'\t' | b'\r' | b'\n' => {}
                b'.' | b'/' => return TextPointer(self.0).get().map(Some),
                _ => break,
            }
        }
        Ok(None)
    }
}

/// The options of the compiler (`CUjit_option`), and a value for each.
#[derive(Debug, Clone, Copy)]
pub(super) struct JitOptions {
    pub(super) count: u32,
    pub(super) names: In<c_int>,
    pub(super) values: InOut<usize>,
}

impl JitOptions {
    fn position(self, wanted: c_int) -> Option<u32> {
        (0..self.count).find(|index| self.names.at(*index) == Ok(wanted))
    }

    /// Write a log into its buffer, and its length into the option that has the size of the buffer. A longer log is cut off.
    pub(super) fn log(self, buffer: c_int, size: c_int, text: &str) -> Result<(), CuCode> {
        let (Some(buffer), Some(size)) = (self.position(buffer), self.position(size)) else {
            return Ok(());
        };
        let values = In(self.values.0.0.cast_const());
        let room = values.at(size)? as u32;
        let to: *mut c_char = with_exposed_provenance_mut(values.at(buffer)?);
        if room > 0 && !to.is_null() {
            Out(to).put_text(i32::try_from(room).unwrap_or(i32::MAX), text)?;
        }
        let written = text.len().min(room.saturating_sub(1) as usize);
        // SAFETY: the caller promises as many values as options.
        unsafe { self.values.0.0.add(size as usize).write_unaligned(written) };
        Ok(())
    }
}

/// A text that ends with a zero byte.
#[repr(transparent)]
#[derive(Debug, Clone, Copy)]
pub(super) struct TextPointer(*const c_char);

impl TextPointer {
    /// Read the text.
    pub(super) fn get<'a>(self) -> Result<&'a str, CuCode> {
        if self.0.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: not NULL, and so terminated by the caller's promise. The symbols use it only until they return.
        unsafe { CStr::from_ptr(self.0) }.to_str().map_err(|_| INVALID_VALUE)
    }
}
