//! The list of replaced functions becomes exported functions, and a table from the driver's to the guard's.

use core::ffi::{CStr, c_void};
use core::ptr::null_mut;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::cuda::{Code, SUCCESS};
use crate::driver::Function;

/// One replaced function.
pub(crate) struct Hook {
    /// The driver's function of the same name.
    pub(crate) driver: Function,
    /// The version of CUDA that brought this form (cudaTypedefs.h).
    version: i32,
    /// What `cuGetProcAddress` gives for it, which may be another address than that of the exported function.
    address: AtomicPtr<c_void>,
    /// The guard's function.
    ours: AtomicPtr<c_void>,
}

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`.
const LEGACY: u64 = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`: the functions with the suffix `_ptsz`.
const PER_THREAD: u64 = 2;

impl Hook {
    pub(crate) const fn new(name: &'static CStr, version: i32, ours: *mut c_void) -> Self {
        Self {
            driver: Function::new(name),
            version,
            address: AtomicPtr::new(null_mut()),
            ours: AtomicPtr::new(ours),
        }
    }

    /// Ask the driver where this function is, by its name without suffixes. A driver without the function answers with an earlier form of it, so it is
    /// not asked.
    pub(crate) fn learn(&self, ask: impl Fn(&CStr, &mut *mut c_void, i32, u64) -> Code) {
        let name = self.driver.name().to_bytes();
        let (name, flags) = match name.strip_suffix(b"_ptsz") {
            Some(name) => (name, PER_THREAD),
            None => (name, LEGACY),
        };
        let name = if let [base @ .., b'_', b'v', _] = name { base } else { name };
        // Room for the longest name.
        let mut base = [0; 48];
        for (to, from) in base.iter_mut().zip(name) {
            *to = *from;
        }
        let base = CStr::from_bytes_until_nul(&base).unwrap_or_default();
        let mut address = null_mut();
        if self.driver.get().is_some() && ask(base, &mut address, self.version, flags) == SUCCESS {
            self.address.store(address, Ordering::Release);
        }
    }

    pub(crate) fn ours(&self) -> *mut c_void {
        self.ours.load(Ordering::Relaxed)
    }
}

/// The place in a table of what replaces one of the driver's functions.
pub(crate) fn find(hooks: &[Hook], address: *mut c_void) -> Option<usize> {
    // Look for an exported function first, because this answer is certain.
    let exported = hooks.iter().position(|hook| hook.driver.get() == Some(address));
    exported.or_else(|| hooks.iter().position(|hook| hook.address.load(Ordering::Acquire) == address))
}

/// Define the replaced functions: name and arguments as in cuda.h, the version of CUDA that brought this form, and what happens. `call` asks the driver with
/// the program's arguments; without a function of this name in the driver it is not run, and the program gets `CUDA_ERROR_NOT_FOUND`.
///
/// Then the functions that launch, and on which GPUs. Where launches are not held, they only test whether the driver's function is known. Where they are held,
/// and the process has one GPU, most of them take one of the launches that were allowed earlier.
macro_rules! hooks {
    (
        $(fn $name:ident($($argument:ident: $type:ty),*) $version:literal: |$call:ident| $rule:expr;)*
        launches:
        $(fn $launch:ident($($given:ident: $kind:ty),*) $since:literal: $on:expr;)*
    ) => {
        #[allow(non_camel_case_types, reason = "the names are NVIDIA's")]
        enum At {
            $($name,)*
            $($launch,)*
        }

        /// Where in the table the functions that launch begin.
        const LAUNCHES: usize = [$(At::$name),*].len();

        static HOOKS: [$crate::hook::Hook; LAUNCHES + [$(At::$launch),*].len()] = [
            $($crate::hook::Hook::new(divvy_shadow::c_name!($name), $version, $name as *mut c_void),)*
            $($crate::hook::Hook::new(divvy_shadow::c_name!($launch), $since, $launch as *mut c_void),)*
        ];

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Code {
                let Some(found) = HOOKS[At::$name as usize].driver.get() else { return NOT_FOUND };
                // SAFETY: the driver's function of this name has these arguments, by cuda.h.
                let function: unsafe extern "C" fn($($type),*) -> Code = unsafe { core::mem::transmute(found) };
                // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for.
                let $call = || unsafe { function($($argument),*) };
                $rule
            }
        )*

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $launch($($given: $kind),*) -> Code {
                type Function = unsafe extern "C" fn($($kind),*) -> Code;

                /// The driver's function, if launches are not held.
                static DIRECT: core::sync::atomic::AtomicPtr<c_void> = core::sync::atomic::AtomicPtr::new(core::ptr::null_mut());

                /// This is a separate function so that the fast path does not have to save registers.
                #[cold]
                #[inline(never)]
                unsafe extern "C" fn pass($($given: $kind),*) -> Code {
                    let Some(found) = launches::pass(&HOOKS[At::$launch as usize], &DIRECT, $on) else { return NOT_FOUND };
                    // SAFETY: the driver's function of this name has these arguments, by cuda.h.
                    let function: Function = unsafe { core::mem::transmute(found) };
                    // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for.
                    unsafe { function($($given),*) }
                }

                let mut found = DIRECT.load(Ordering::Relaxed);
                if found.is_null() {
                    found = match HOOKS[At::$launch as usize].driver.known() {
                        Some(found) if launches::spend() => found,
                        // SAFETY: the caller's promise.
                        _ => return unsafe { pass($($given),*) },
                    };
                }
                // SAFETY: as above.
                let function: Function = unsafe { core::mem::transmute(found) };
                // SAFETY: as above.
                unsafe { function($($given),*) }
            }
        )*
    };
}
