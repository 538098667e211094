//! The list of replaced functions becomes exported functions, and a table from the driver's to the guard's.

use core::ffi::{CStr, c_void};
use core::ptr::{null_mut, without_provenance_mut};
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::cuda::{CuResult, SUCCESS};
use crate::driver::RealFunction;

/// One replaced function.
pub(crate) struct HookedFunction {
    /// The driver's function of the same name.
    pub(crate) driver: RealFunction,
    /// The hash of the name by which programs ask for it.
    base: u32,
    /// The version of CUDA that brought this form (cudaTypedefs.h).
    version: u16,
    /// Where its name begins in the text of all names.
    name: u16,
    /// What `cuGetProcAddress` gives for it, which may be another address than that of the exported function. Null: the driver was not asked yet.
    address: AtomicPtr<c_void>,
    /// The guard's function.
    ours: AtomicPtr<c_void>,
}

/// The functions have shorter names.
pub(crate) const LONGEST: usize = 48;

/// The driver gives no address for this form.
const NONE: *mut c_void = without_provenance_mut(1);

/// The name of a function without the suffixes of its form: programs ask for it by this name, a version, and flags.
const fn base(name: &[u8]) -> &[u8] {
    let name = match name {
        [base @ .., b'_', b'p', b't', b's', b'z'] => base,
        _ => name,
    };
    match name {
        [base @ .., b'_', b'v', _] => base,
        _ => name,
    }
}

/// Where in a text of names that end with 0 one of them begins, and the name.
const fn name(text: &[u8], mut place: usize) -> (usize, &[u8]) {
    let mut rest = text;
    while place > 0 {
        if let [0, ..] = rest {
            place -= 1;
        }
        if let [_, others @ ..] = rest {
            rest = others;
        }
    }
    let mut length = 0;
    while rest[length] != 0 {
        length += 1;
    }
    (text.len() - rest.len(), rest.split_at(length).0)
}

const fn hash(mut name: &[u8]) -> u32 {
    let mut hash: u32 = 0;
    while let [first, rest @ ..] = name {
        hash = (hash ^ *first as u32).wrapping_mul(0x0100_0193).rotate_left(5);
        name = rest;
    }
    hash
}

/// `CU_GET_PROC_ADDRESS_LEGACY_STREAM`. With the other flag, the drivers from R470 to R555 give the same address for each replaced function without a form `_ptsz`.
const LEGACY: u64 = 1;
/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`: the functions with the suffix `_ptsz`.
const PER_THREAD: u64 = 2;

impl HookedFunction {
    /// The function with this place in the text of all names.
    pub(crate) const fn new(names: &str, place: usize, version: u16, ours: *mut c_void) -> Self {
        let (start, name) = name(names.as_bytes(), place);
        Self {
            driver: RealFunction::new(),
            base: hash(base(name)),
            version,
            name: start as u16,
            address: AtomicPtr::new(null_mut()),
            ours: AtomicPtr::new(ours),
        }
    }

    /// Return where `cuGetProcAddress` says that this function is. A driver without the function answers with an earlier form of it, so it is not asked.
    fn address(&self, names: &'static str, ask: impl Fn(&CStr, &mut *mut c_void, i32, u64) -> CuResult) -> *mut c_void {
        let known = self.address.load(Ordering::Acquire);
        if !known.is_null() {
            return known;
        }
        let name = self.name(names).to_bytes();
        let flags = if name.ends_with(b"_ptsz") { PER_THREAD } else { LEGACY };
        let mut text = [0; LONGEST];
        for (to, from) in text.iter_mut().zip(base(name)) {
            *to = *from;
        }
        let mut address = null_mut();
        let name = CStr::from_bytes_until_nul(&text).unwrap_or_default();
        if self.real(names).is_none() || ask(name, &mut address, self.version.into(), flags) != SUCCESS || address.is_null() {
            address = NONE;
        }
        self.address.store(address, Ordering::Release);
        address
    }

    /// The driver's function. The text of all names is that of `new`.
    pub(crate) fn real(&self, names: &'static str) -> Option<*mut c_void> {
        self.driver.known().or_else(|| self.driver.get(self.name(names)))
    }

    fn name(&self, names: &'static str) -> &'static CStr {
        let rest = names.as_bytes().get(usize::from(self.name)..);
        rest.and_then(|rest| CStr::from_bytes_until_nul(rest).ok())
            .unwrap_or_default()
    }

    pub(crate) fn ours(&self) -> *mut c_void {
        self.ours.load(Ordering::Relaxed)
    }
}

/// The place in a table of what replaces the driver's function at an address, which the driver has given for a name. Which form of a function a name means
/// depends on the version and the flags, and only the driver knows it. So the name only says which forms are compared: a program asks for hundreds of functions.
pub(crate) fn find(
    hooks: &[HookedFunction],
    names: &'static str,
    bases: &HashFilter,
    name: &[u8],
    address: *mut c_void,
    ask: impl Fn(&CStr, &mut *mut c_void, i32, u64) -> CuResult,
) -> Option<usize> {
    let wanted = hash(base(name));
    if !has(bases, wanted) {
        return None;
    }
    let place = |is: &dyn Fn(&HookedFunction) -> bool| hooks.iter().position(|hook| hook.base == wanted && is(hook));
    // Look for an exported function first, because this answer is certain.
    place(&|hook| hook.real(names) == Some(address)).or_else(|| place(&|hook| hook.address(names, &ask) == address))
}

/// A set of hashes by their lowest bits, which has all that were put in, and few others.
type HashFilter = [u64; 4];

const fn has(set: &HashFilter, hash: u32) -> bool {
    set[(hash >> 6 & 3) as usize] >> (hash & 63) & 1 != 0
}

/// The set of the names by which programs ask for these functions.
pub(crate) const fn bases(mut names: &[&[u8]]) -> HashFilter {
    let mut set = [0; 4];
    while let [first, rest @ ..] = names {
        let hash = hash(base(first));
        set[(hash >> 6 & 3) as usize] |= 1 << (hash & 63);
        names = rest;
    }
    set
}

/// Define the replaced functions: name and arguments as in cuda.h, the version of CUDA that brought this form, and what happens. `call` asks the driver with
/// the program's arguments; without a function of this name in the driver it is not run, and the program gets `CUDA_ERROR_NOT_FOUND`.
///
/// Then the functions with rules for what the driver has done, which get its answer.
///
/// Then the functions that also work with a driver that lacks them.
///
/// Then the functions that launch, and on which GPUs. Where launches are not held, they only test whether the driver's function is known. Where they are held,
/// most of them take one of the launches that were allowed earlier.
macro_rules! hooks {
    (
        $(fn $name:ident($($argument:ident: $type:ty),*) $version:literal: |$call:ident| $rule:expr;)*
        afterwards:
        $(fn $after:ident($($passed:ident: $like:ty),*) $appeared:literal: |$code:ident| $then:expr;)*
        always:
        $(fn $always:ident($($input:ident: $form:ty),*) $first:literal: $answer:expr;)*
        launches:
        $(fn $launch:ident($($given:ident: $kind:ty),*) $since:literal: $on:expr;)*
    ) => {
        #[allow(non_camel_case_types, reason = "the names are NVIDIA's")]
        enum At {
            $($name,)*
            $($after,)*
            $($always,)*
            $($launch,)*
        }

        /// Where in the table the functions that launch begin.
        const LAUNCHES: usize = [$(At::$name,)* $(At::$after,)* $(At::$always),*].len();

        /// Their names, each with a 0 at its end.
        static NAMES: &str = concat!($(stringify!($name), "\0",)* $(stringify!($after), "\0",)* $(stringify!($always), "\0",)* $(stringify!($launch), "\0",)*);

        /// The names by which programs ask for them.
        static BASES: [u64; 4] = $crate::hook::bases(&[
            $(stringify!($name).as_bytes(),)*
            $(stringify!($after).as_bytes(),)*
            $(stringify!($always).as_bytes(),)*
            $(stringify!($launch).as_bytes(),)*
        ]);

        static HOOKS: [$crate::hook::HookedFunction; LAUNCHES + [$(At::$launch),*].len()] = [
            $($crate::hook::HookedFunction::new(NAMES, At::$name as usize, $version, $name as *mut c_void),)*
            $($crate::hook::HookedFunction::new(NAMES, At::$after as usize, $appeared, $after as *mut c_void),)*
            $($crate::hook::HookedFunction::new(NAMES, At::$always as usize, $first, $always as *mut c_void),)*
            $($crate::hook::HookedFunction::new(NAMES, At::$launch as usize, $since, $launch as *mut c_void),)*
        ];

        /// The driver's function that one of these replaces.
        #[inline(never)]
        fn real(place: At) -> Option<*mut c_void> {
            HOOKS.get(place as usize)?.real(NAMES)
        }

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> CuResult {
                let Some(found) = real(At::$name) else { return NOT_FOUND };
                // SAFETY: the driver's function of this name has these arguments, by cuda.h. The program called this one as if it were the driver's, with arguments
                // that it vouches for.
                let $call = &unsafe { $crate::cuda::DriverCall::new(found, [$($crate::cuda::CallArgument::bits($argument)),*]) };
                $rule
            }
        )*

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $after($($passed: $like),*) -> CuResult {
                let Some(found) = real(At::$after) else { return NOT_FOUND };
                // SAFETY: the driver's function of this name has these arguments, by cuda.h.
                let function: unsafe extern "C" fn($($like),*) -> CuResult = unsafe { core::mem::transmute(found) };
                // SAFETY: the program called this function as if it were the driver's, with arguments that it vouches for.
                let $code = unsafe { function($($passed),*) };
                $then
            }
        )*

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $always($($input: $form),*) -> CuResult {
                $answer
            }
        )*

        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $launch($($given: $kind),*) -> CuResult {
                type Function = unsafe extern "C" fn($($kind),*) -> CuResult;

                /// The driver's function, if launches are not held.
                static DIRECT: core::sync::atomic::AtomicPtr<c_void> = core::sync::atomic::AtomicPtr::new(core::ptr::null_mut());

                /// This is a separate function so that the fast path does not have to save registers.
                #[cold]
                #[inline(never)]
                unsafe extern "C" fn pass($($given: $kind),*) -> CuResult {
                    let Some(found) = launches::pass(real(At::$launch), &DIRECT, $on) else { return NOT_FOUND };
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

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Stands for the address that `cuGetProcAddress` gives for the function that was asked for last.
    const OTHER: *mut c_void = without_provenance_mut(0x1000);

    /// Functions that are in the C library stand for those of the driver.
    /// The lookup asks only for the forms of this function.
    #[test]
    fn a_function_is_found_by_both_its_addresses() {
        let ours = without_provenance_mut(8);
        const NAMES: &str = "strlen\0getpid\0getpid_v2\0getppid\0";
        let hooks = [1, 2, 3, 4].map(|version| HookedFunction::new(NAMES, usize::from(version) - 1, version, ours));
        let bases = bases(&[b"strlen", b"getpid", b"getpid_v2", b"getppid"]);
        let asked = RefCell::new(Vec::new());
        let find = |name: &[u8], address| {
            find(&hooks, NAMES, &bases, name, address, |name, address, version, flags| {
                asked.borrow_mut().push((name.to_owned(), version, flags));
                *address = OTHER;
                SUCCESS
            })
        };
        let exported = hooks[1].real(NAMES).expect("the C library has it");
        assert_eq!(find(b"getpid", exported), Some(1));
        assert_eq!(asked.take(), []);
        assert_eq!(find(b"getpid", OTHER), Some(1));
        // The C library does not have the other form, so it is not asked for.
        let expected = [(c"getpid".to_owned(), 2, LEGACY)];
        assert_eq!(asked.take(), expected);
        for name in [&b"getpid_v2"[..], b"getpid", b"getpid_ptsz"] {
            assert_eq!(find(name, OTHER), Some(1));
            assert_eq!(find(name, without_provenance_mut(0x2000)), None);
        }
        assert_eq!(find(b"getuid", exported), None);
        assert_eq!(asked.take(), [], "it was asked for before");
    }
}
