//! Which file the loader uses.

use core::ffi::c_char;

use divvy_shadow::sys::{self, RawFile};
use divvy_share::{GUARD_CUDA, GUARD_NVML, REAL_CUDA, REAL_NVML};

use crate::copy::Copy;
use crate::text::CText;

/// One of the driver's libraries.
struct DriverLibrary {
    /// Its name without a version.
    name: &'static [u8],
    /// What takes its place, as a C string.
    guard: &'static [u8],
    /// What this one needs, as a C string.
    real: &'static [u8],
    /// In whose place the loader takes the guard: what the guard needs instead.
    copy: &'static Copy,
}

/// A text with a 0 at its end.
macro_rules! c_bytes {
    ($text:expr) => {{
        const TEXT: &str = $text;
        static BYTES: [u8; TEXT.len() + 1] = {
            let mut bytes = [0; TEXT.len() + 1];
            let mut index = 0;
            while index < TEXT.len() {
                bytes[index] = TEXT.as_bytes()[index];
                index += 1;
            }
            bytes
        };
        &BYTES
    }};
}

/// One for each library. They are zeros at first, so the library's file does not contain them.
static COPIES: [Copy; 2] = [Copy::none(), Copy::none()];

static LIBRARIES: [DriverLibrary; 2] = [
    DriverLibrary {
        name: b"libcuda.so",
        guard: c_bytes!(GUARD_CUDA),
        real: c_bytes!(REAL_CUDA),
        copy: &COPIES[0],
    },
    DriverLibrary {
        name: b"libnvidia-ml.so",
        guard: c_bytes!(GUARD_NVML),
        real: c_bytes!(REAL_NVML),
        copy: &COPIES[1],
    },
];

/// Return the path that the loader uses in place of this one, if it is another one.
pub(crate) fn search(path: CText<'_>) -> Option<*const c_char> {
    for library in &LIBRARIES {
        if path.is(library.real) {
            return library.copy.get();
        }
        if path.has_name(library.name) {
            return library.in_place_of(path);
        }
    }
    None
}

impl DriverLibrary {
    fn in_place_of(&self, path: CText<'_>) -> Option<*const c_char> {
        let start: *const c_char = self.guard.as_ptr().cast();
        // SAFETY: it is a constant, which ends with 0.
        let guard = open(unsafe { CText::new(start) })?;
        // The loader continues its search if it cannot use a file.
        let file = open(path).filter(is_for_this_machine)?;
        if sys::identity(&file) == sys::identity(&guard) {
            self.copy.forget();
            return None;
        }
        self.copy.set(path).then_some(start)
    }
}

fn open(path: CText<'_>) -> Option<RawFile> {
    sys::open_linked(path.as_c_str()).ok()
}

/// The start of an ELF file: the four bytes that say so, 64 bits, least significant byte first, and, at a distance of 18 bytes, the machine.
fn is_for_this_machine(file: &RawFile) -> bool {
    const MACHINE: u8 = if cfg!(target_arch = "aarch64") { 183 } else { 62 };
    let mut bytes = [0_u8; 20];
    // SAFETY: any bytes are bytes.
    let read = unsafe { sys::read(file, &mut bytes) };
    read.is_ok()
        && matches!(
            bytes,
            [0x7f, b'E', b'L', b'F', 2, 1, _, _, _, _, _, _, _, _, _, _, _, _, MACHINE, 0]
        )
}
