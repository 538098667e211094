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

/// Before glibc 2.35, whose interface has version 2, an audit library makes each call between libraries slow.
#[test]
#[allow(unsafe_code, reason = "it calls the library")]
fn a_loader_before_version_2_of_the_interface_does_not_use_it() {
    let sandbox = Sandbox::new();
    // SAFETY: the library has no code that runs at loading.
    let library = unsafe { Library::open(Some(sandbox.path("libdivvy-guard-audit.so")), RTLD_NOW | RTLD_LOCAL) }.unwrap();
    // SAFETY: the type is that of link.h.
    let version = unsafe { library.get::<unsafe extern "C" fn(u32) -> u32>(b"la_version") }.unwrap();
    for (loader, expected) in [(0, 0), (1, 0), (2, 2), (3, 2)] {
        // SAFETY: the function only compares numbers.
        assert_eq!(unsafe { version(loader) }, expected, "{loader}");
    }
}
