//! How a library for containers is linked: its name, its one needed library if it has one, and nothing else. For build scripts.

#![allow(clippy::print_stdout, reason = "Cargo reads what a build script prints")]

use std::path::{Path, PathBuf};
use std::process::Command;

/// Print what Cargo needs to link a library with this name over the real library at this absolute path. The loader looks nowhere else for it. Without the
/// package's feature `shadow`, it is an ordinary library.
pub fn shadow(name: &str, real: &str) {
    if !alone(name) {
        return;
    }
    let file = Path::new(real).file_name().expect("the real library has a name");
    // The linker writes the name that a library has, not where it was found, into what needs it. So it gets an empty library with that name. It is
    // made with the compiler driver that rustc links with.
    let stub = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join(file);
    let linker = std::env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let status = Command::new(&linker)
        .args(["-shared", "-nostdlib", "-x", "assembler", "/dev/null", "-o"])
        .arg(&stub)
        .arg(format!("-Wl,-soname,{real}"))
        .status();
    match status {
        Ok(status) if status.success() => {}
        other => panic!("{} could not make {}: {other:?}", linker.to_string_lossy(), stub.display()),
    }
    // A program that closes the library and opens it again must find the same state.
    for argument in ["-Wl,-z,nodelete", "-Wl,--no-as-needed"] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    println!("cargo::rustc-cdylib-link-arg={}", stub.display());
}

/// Print what Cargo needs to link a library with this name that needs no other. Without the package's feature `shadow`, it is an ordinary library, and the
/// result is `false`.
pub fn alone(name: &str) -> bool {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_SHADOW").is_none() {
        return false;
    }
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,{name}");
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-Wl,-z,now",
        "-Wl,-s",
        // It would be for symbols that are kept elsewhere, and there are none.
        "-Wl,--build-id=none",
        // No part that the loader makes read-only: that takes 10 microseconds of each start, one segment and one system call more. The part would have one
        // pointer to code, that of `dlsym`, next to the table of the driver's functions, which stays writable.
        "-Wl,-z,norelro",
        // The library's own functions, also in a program that has others of these names.
        "-Wl,-Bsymbolic",
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    true
}
