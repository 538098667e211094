//! The functions of the real library.

use core::ffi::{CStr, c_char, c_void};
use core::ptr::{null_mut, without_provenance_mut};
use core::sync::atomic::{AtomicPtr, Ordering};

unsafe extern "C" {
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `RTLD_NEXT`: search what the loader has after the library that asks. That is the real library, which is all that a shadow needs.
const NEXT: *mut c_void = without_provenance_mut(usize::MAX);
/// The real library has no function of this name.
const MISSING: *mut c_void = without_provenance_mut(1);

/// A function of the real library, which is looked up once. It does not have its own name: the loader would have to adjust a pointer to it.
#[derive(Debug, Default)]
pub struct RealFunction(AtomicPtr<c_void>);

impl RealFunction {
    /// A function that was not looked up yet.
    pub const fn new() -> Self {
        Self(AtomicPtr::new(null_mut()))
    }

    /// Where it is, if it was looked up before and the real library has it. This calls no other function.
    pub fn known(&self) -> Option<*mut c_void> {
        let found = self.0.load(Ordering::Acquire);
        (!found.is_null() && found != MISSING).then_some(found)
    }

    /// Where it is; `None` when the real library does not have it. The name is the same each time.
    pub fn get(&self, name: &CStr) -> Option<*mut c_void> {
        let mut found = self.0.load(Ordering::Acquire);
        if found.is_null() {
            // SAFETY: the handle is a valid one, and the name ends with 0.
            found = unsafe { dlsym(NEXT, name.as_ptr()) };
            if found.is_null() {
                found = MISSING;
            }
            self.0.store(found, Ordering::Release);
        }
        (found != MISSING).then_some(found)
    }
}

/// The C string of a name.
#[macro_export]
macro_rules! c_name {
    ($name:ident) => {
        const {
            match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                Ok(name) => name,
                Err(_) => panic!("a name has no 0"),
            }
        }
    };
}
