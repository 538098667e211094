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

/// A function of the real library, which is looked up once.
#[derive(Debug)]
pub struct Function {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Function {
    /// The function of this name.
    pub const fn new(name: &'static CStr) -> Self {
        Self {
            name,
            found: AtomicPtr::new(null_mut()),
        }
    }

    /// Its name.
    pub fn name(&self) -> &'static CStr {
        self.name
    }

    /// Where it is, if it was looked up before and the real library has it. This calls no other function.
    pub fn known(&self) -> Option<*mut c_void> {
        let found = self.found.load(Ordering::Acquire);
        (!found.is_null() && found != MISSING).then_some(found)
    }

    /// Where it is; `None` when the real library does not have it.
    pub fn get(&self) -> Option<*mut c_void> {
        let mut found = self.found.load(Ordering::Acquire);
        if found.is_null() {
            // SAFETY: the handle is a valid one, and the name ends with 0.
            found = unsafe { dlsym(NEXT, self.name.as_ptr()) };
            if found.is_null() {
                found = MISSING;
            }
            self.found.store(found, Ordering::Release);
        }
        (found != MISSING).then_some(found)
    }
}

/// The C string of a name.
#[macro_export]
macro_rules! c_name {
    ($name:ident) => {
        match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => panic!("a name has no 0"),
        }
    };
}
