//! What the library is, as a file.

use divvy_shadow_testkit::Elf;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use crate::sandbox::{Sandbox, audit};

#[test]
fn it_exports_what_the_loader_calls_and_nothing_else() {
    assert_eq!(Elf::of(audit()).exports(), ["la_objsearch", "la_version"]);
}

/// Its namespace has no C library. In particular it has no code that panics.
#[test]
fn it_needs_no_symbol_and_no_library() {
    assert_eq!(Elf::of(audit()).undefined(), [""; 0]);
    assert_eq!(Elf::of(audit()).needed(), [""; 0]);
    assert_eq!(Elf::of(audit()).names(), ["libdivvy-guard-audit.so"]);
}

#[test]
fn it_asks_for_no_version_and_runs_no_code_at_loading() {
    Elf::of(audit()).assert_loads_anywhere();
}

#[test]
fn it_is_small() {
    assert!(audit().len() <= 16 << 10, "{} bytes", audit().len());
}

/// The interface has version 2 since glibc 2.35. On ARM, an older glibc loses arguments of functions, so it must not use the library. On x86, glibc 2.27
/// crashes if an audit library refuses, so it must use the library.
#[test]
#[allow(unsafe_code, reason = "it calls the library")]
fn a_loader_uses_it_where_programs_then_work() {
    let sandbox = Sandbox::new();
    // SAFETY: the library has no code that runs at loading.
    let library = unsafe { Library::open(Some(sandbox.path("libdivvy-guard-audit.so")), RTLD_NOW | RTLD_LOCAL) }.unwrap();
    // SAFETY: the type is that of link.h.
    let version = unsafe { library.get::<unsafe extern "C" fn(u32) -> u32>(b"la_version") }.unwrap();
    let first = if cfg!(target_arch = "aarch64") { 0 } else { 1 };
    for (loader, expected) in [(0, 0), (1, first), (2, 2), (3, 2)] {
        // SAFETY: the function only compares numbers.
        assert_eq!(unsafe { version(loader) }, expected, "{loader}");
    }
}
