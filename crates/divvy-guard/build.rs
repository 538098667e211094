//! Links the shadow library: its name, its one needed library, and nothing else.

use std::path::PathBuf;
use std::process::Command;

/// Where a container has the real library. It is needed by its absolute path, so the loader looks nowhere else for it.
const REAL: &str = "/run/divvy/guard/libcuda.so.real";

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    if std::env::var_os("CARGO_FEATURE_SHADOW").is_none() {
        return;
    }
    // The linker writes the name that a library has, not where it was found, into what needs it. So it gets an empty library with that name. It is
    // made with the compiler driver that rustc links with.
    let stub = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR")).join("libcuda.so.real");
    let linker = std::env::var_os("RUSTC_LINKER").unwrap_or_else(|| "cc".into());
    let status = Command::new(&linker)
        .args(["-shared", "-nostdlib", "-x", "assembler", "/dev/null", "-o"])
        .arg(&stub)
        .arg(format!("-Wl,-soname,{REAL}"))
        .status();
    match status {
        Ok(status) if status.success() => {}
        other => panic!("{} could not make {}: {other:?}", linker.to_string_lossy(), stub.display()),
    }
    for argument in [
        "-nostartfiles",
        "-nodefaultlibs",
        "-Wl,-soname,libcuda.so.1",
        // A program that closes the library and opens it again must find the same state.
        "-Wl,-z,nodelete",
        "-Wl,-z,now",
        "-Wl,-s",
        // The guard's own functions, also in a program that has others of these names.
        "-Wl,-Bsymbolic",
        "-Wl,--no-as-needed",
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
    println!("cargo::rustc-cdylib-link-arg={}", stub.display());
}
