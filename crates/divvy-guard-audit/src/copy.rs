//! The path of the copy in whose place the loader takes the guard.

use core::ffi::c_char;
use core::sync::atomic::{AtomicU8, Ordering};

use crate::text::CText;

/// The longest path that a system call takes, with the 0 at its end (`PATH_MAX`).
const LONGEST: usize = 4096;

/// A path, or none. The loader holds its lock from the moment at which it finds a file until it has loaded all that this file needs, so no other thread reads
/// or writes meanwhile. If that were wrong, the bytes would still be those of paths.
#[derive(Debug)]
pub(crate) struct Copy([AtomicU8; LONGEST]);

impl Copy {
    pub(crate) const fn none() -> Copy {
        Copy([const { AtomicU8::new(0) }; LONGEST])
    }

    /// Remember a path. It is not possible if it is longer than paths can be.
    pub(crate) fn set(&self, path: CText<'_>) -> bool {
        let bytes = path.bytes();
        if bytes.len() > LONGEST {
            return false;
        }
        for (place, byte) in self.0.iter().zip(bytes) {
            place.store(*byte, Ordering::Relaxed);
        }
        true
    }

    pub(crate) fn forget(&self) {
        let [first, ..] = &self.0;
        first.store(0, Ordering::Relaxed);
    }

    /// The path, which ends with 0.
    pub(crate) fn get(&self) -> Option<*const c_char> {
        let [first, ..] = &self.0;
        (first.load(Ordering::Relaxed) != 0).then(|| self.0.as_ptr().cast())
    }
}
