//! A string of the loader.

use core::ffi::{CStr, c_char};

/// The bytes of a C string. The functions are loops: those of `core` call strlen(3) and memcmp(3).
#[derive(Debug, Clone, Copy)]
pub(crate) struct CText<'a>(&'a CStr);

impl<'a> CText<'a> {
    /// # Safety
    ///
    /// The string ends with 0, and is not changed as long as the result lives.
    pub(crate) unsafe fn new(start: *const c_char) -> CText<'a> {
        let mut length = 0_usize;
        // SAFETY: all bytes up to the 0 belong to the string, by the caller's promise.
        while unsafe { *start.wrapping_add(length) } != 0 {
            length = length.wrapping_add(1);
        }
        // SAFETY: the same, with the 0 included. It is the first one.
        let bytes = unsafe { core::slice::from_raw_parts(start.cast(), length.wrapping_add(1)) };
        // SAFETY: as above.
        CText(unsafe { CStr::from_bytes_with_nul_unchecked(bytes) })
    }

    pub(crate) fn as_c_str(self) -> &'a CStr {
        self.0
    }

    /// All bytes, with the 0 at the end.
    pub(crate) fn bytes(self) -> &'a [u8] {
        self.0.to_bytes_with_nul()
    }

    /// Whether it is the same string as the one at a place that the tests change in the file of the library.
    pub(crate) fn is(self, other: &'static [u8]) -> bool {
        self.bytes().len() == other.len()
            && self.bytes().iter().zip(other).all(|(one, other)| {
                // SAFETY: the reference is valid. Volatile, so that the compiler does not put the bytes it knows into the code.
                *one == unsafe { core::ptr::read_volatile(other) }
            })
    }

    /// Return the text after the last slash. `None` if there is no slash.
    fn file(self) -> Option<&'a [u8]> {
        let mut file = None;
        let mut rest = self.0.to_bytes();
        while let [first, after @ ..] = rest {
            if *first == b'/' {
                file = Some(after);
            }
            rest = after;
        }
        file
    }

    /// Whether it is the path of a file with the name of a library, with or without a version: `/x/libcuda.so`, `/x/libcuda.so.560.35.03`.
    pub(crate) fn has_name(self, library: &[u8]) -> bool {
        let Some(mut file) = self.file() else { return false };
        for expected in library {
            match file {
                [byte, rest @ ..] if byte == expected => file = rest,
                _ => return false,
            }
        }
        match file {
            [] => true,
            [b'.', version @ ..] => !version.is_empty() && version.iter().all(|byte| matches!(byte, b'.' | b'0'..=b'9')),
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CString;

    use proptest::prelude::*;

    use super::*;

    fn has_name(text: &str) -> bool {
        let text = CString::new(text).expect("no 0");
        // SAFETY: it is a C string, which lives to the end of the function.
        unsafe { CText::new(text.as_ptr()) }.has_name(b"libcuda.so")
    }

    /// A version after the name is allowed.
    #[test]
    fn only_files_named_like_the_library_are_meant() {
        for name in ["libcuda.so", "libcuda.so.1", "libcuda.so.560.35.03"] {
            assert!(has_name(&format!("/x/{name}")) && has_name(&format!("./{name}")), "{name}");
            assert!(!has_name(name), "{name}: the loader has not found it yet");
        }
        for name in [
            "libcuda.so.real",
            "libcuda.so.1.bak",
            "libcuda.so.",
            "libcuda.sox",
            "libcudart.so.12",
            "xlibcuda.so",
            "libcuda",
            "",
        ] {
            assert!(!has_name(&format!("/x/{name}")), "{name}");
        }
        assert!(!has_name("/libcuda.so.1/libc.so.6"));
    }

    proptest! {
        #[test]
        fn any_text_is_judged_as_by_the_standard_library(text in "(/|a|\\.|1|libcuda\\.so|\\PC){0,8}") {
            let version = text.rsplit_once('/').and_then(|(_, file)| file.strip_prefix("libcuda.so"));
            let expected = version.is_some_and(|version| match version.strip_prefix('.') {
                Some(rest) => !rest.is_empty() && rest.chars().all(|c| c == '.' || c.is_ascii_digit()),
                None => version.is_empty(),
            });
            prop_assert_eq!(has_name(&text), expected);
        }
    }
}
