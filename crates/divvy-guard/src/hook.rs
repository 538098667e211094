//! The list of replaced functions becomes exported functions, and a map from the driver's to the guard's.

use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::cuda::{Code, SUCCESS};
use crate::driver::Function;

/// One replaced function.
pub(crate) struct Hook {
    /// The driver's function of the same name.
    pub(crate) driver: Function,
    /// How `cuGetProcAddress` is asked for it: the name without a suffix, the version of CUDA that brought this form (cudaTypedefs.h), and the
    /// flags.
    base: &'static CStr,
    version: i32,
    flags: u64,
    /// What `cuGetProcAddress` gives for it, which may be another address than that of the exported function.
    address: AtomicPtr<c_void>,
}

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const LEGACY: u64 = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`: the functions with the suffix `_ptsz`.
const PER_THREAD: u64 = 2;

impl Hook {
    pub(crate) const fn new(name: &'static CStr, base: &'static CStr, version: i32) -> Self {
        Self {
            driver: Function::new(name),
            base,
            version,
            flags: if let [.., b'_', b'p', b't', b's', b'z'] = name.to_bytes() {
                PER_THREAD
            } else {
                LEGACY
            },
            address: AtomicPtr::new(null_mut()),
        }
    }

    /// Ask the driver where this function is. A driver without the function answers with an earlier form of it, so it is not asked.
    pub(crate) fn learn(&self, ask: impl Fn(&CStr, &mut *mut c_void, i32, u64) -> Code) {
        let mut address = null_mut();
        if self.driver.get().is_some() && ask(self.base, &mut address, self.version, self.flags) == SUCCESS {
            self.address.store(address, Ordering::Release);
        }
    }

    /// Whether an address is that of the driver's exported function.
    pub(crate) fn exported_at(&self, address: *mut c_void) -> bool {
        self.driver.get() == Some(address)
    }

    /// Whether an address is what the driver gives out for this function.
    pub(crate) fn given_out_at(&self, address: *mut c_void) -> bool {
        self.address.load(Ordering::Acquire) == address
    }
}

/// Define the replaced functions: name and arguments as in cuda.h, how `cuGetProcAddress` knows it, and what happens. `call` asks the driver with
/// the program's arguments; without a function of this name in the driver it is not run, and the program gets `CUDA_ERROR_NOT_FOUND`.
macro_rules! hooks {
    ($(fn $name:ident($($argument:ident: $type:ty),*) is $base:literal $version:literal: |$call:ident| $rule:expr;)*) => {
        #[allow(non_upper_case_globals, reason = "the names are NVIDIA's")]
        mod of {
            $(pub(super) static $name: $crate::hook::Hook = $crate::hook::Hook::new(
                divvy_shadow::c_name!($name),
                $base,
                $version,
            );)*
        }

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Code {
                let Some(found) = of::$name.driver.get() else { return NOT_FOUND };
                // SAFETY: the driver's function of this name has these arguments, by cuda.h.
                let function: unsafe extern "C" fn($($type),*) -> Code = unsafe { core::mem::transmute(found) };
                // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for.
                let $call = || unsafe { function($($argument),*) };
                $rule
            }
        )*

        /// Ask the driver for the addresses that it gives out.
        fn learn(ask: impl Fn(&core::ffi::CStr, &mut *mut c_void, i32, u64) -> Code) {
            $(of::$name.learn(&ask);)*
        }

        /// The guard's function for one of the driver's.
        fn instead_of(address: *mut c_void) -> Option<*mut c_void> {
            $(if of::$name.exported_at(address) {
                return Some($name as *mut c_void);
            })*
            $(if of::$name.given_out_at(address) {
                return Some($name as *mut c_void);
            })*
            None
        }
    };
}
