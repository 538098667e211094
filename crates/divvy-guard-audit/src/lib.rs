//! Has the dynamic loader take Divvy's guard where it finds another copy of CUDA's driver library or of NVML.
//!
//! `divvy-guard` and `divvy-guard-nvml` take the place of the driver's libraries that the container gets. A program may find another copy: of a package for
//! forward compatibility (`/usr/local/cuda/compat`), of a conda environment, or one that the program itself brings. Where the loader finds such a copy, this library
//! makes it load the guard. Where the guard needs its real library, this library makes the loader load the copy. So the program runs with the driver library that it
//! would have without the guard, and is held to the share.
//!
//! # How
//!
//! The loader of glibc loads the libraries that `LD_AUDIT` names, and asks them about each file in which it looks for a library (rtld-audit(7), `la_objsearch`).
//! The agent sets this variable in the grant's CDI spec, with `--guard both`. The loader asks for the libraries that programs are linked with, and for those that
//! they load with `dlopen`, wherever the path comes from (the program, `RPATH`, `LD_LIBRARY_PATH`, the cache), also with `RTLD_DEEPBIND` and in other
//! namespaces.
//!
//! The other ways were worse. `LD_PRELOAD` in a CDI spec replaces the variable of the pod or image, which many have (jemalloc), and a mounted
//! `/etc/ld.so.preload` replaces the image's. What they load is part of every program: AddressSanitizer refuses to start, and the function that replaces `dlopen`
//! or `dlsym` must hide from the loader who called it. It also does not see libraries that a program is linked with. An audit library is in a namespace of its
//! own, in which no function of the program changes.
//!
//! # What it does not reach
//!
//! - On ARM, glibc before 2.35 loses arguments of functions if there is an audit library (sourceware bug 26643). Therefore [`la_version`] tells these versions not to use this library.
//! - Programs that are static, use musl, or are setuid, and programs that remove `LD_AUDIT` from their environment.
//! - `dlmopen` of an absolute path into a new namespace, and paths with `$ORIGIN`: the loader does not ask about them.
//!
//! The agent sees all of these in the driver's numbers.
//!
//! # What it costs
//!
//! glibc before 2.35 sends calls between libraries through a slow path if there is an audit library (sourceware bug 15533). With any audit library, thread-local
//! variables that a program's libraries need at fixed places must fit into a reserve ([`divvy_share::TUNABLES`]), or the program does not start. The reserve is
//! fixed in glibc before 2.33, where it is too small for jemalloc, and no reserve is large enough for ThreadSanitizer.
//!
//! # Rules for this code
//!
//! It is loaded into each dynamic program of the container, so the rules of `divvy-guard` hold. In addition it may need no symbol at all, because its namespace
//! has no C library. It makes system calls only for a file that has the name of one of the driver's libraries.

#![cfg_attr(feature = "shadow", no_std)]
// The compiler must not make calls of memcpy(3) of loops.
#![no_builtins]
#![allow(unsafe_code, reason = "a C ABI, and the loader's strings")]

mod copy;
mod search;
mod text;

use core::ffi::{c_char, c_uint};

use search::search;
use text::CText;

/// The version of the interface since glibc 2.35.
const VERSION: c_uint = 2;
/// The first version with which programs work. On x86, glibc 2.27 would crash if it were told not to use the library.
const FIRST: c_uint = if cfg!(target_arch = "aarch64") { 2 } else { 1 };

/// The loader says which version of the interface it has. 0: it must not use this library.
#[unsafe(no_mangle)]
pub extern "C" fn la_version(version: c_uint) -> c_uint {
    if version < FIRST { 0 } else { version.min(VERSION) }
}

/// The loader is about to look for a library in this file, or, with a name without a slash, in directories. It uses the name that is returned.
///
/// # Safety
///
/// The name ends with 0.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn la_objsearch(name: *const c_char, _cookie: *mut usize, _how: c_uint) -> *const c_char {
    // SAFETY: the caller's promise; the loader does not change the name during the call.
    let text = unsafe { CText::new(name) };
    search(text).unwrap_or(name)
}
