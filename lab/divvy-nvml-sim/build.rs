//! Linker options of the simulated driver library.

fn main() {
    // A thread serves the control socket, so `dlclose` after a failed nvmlInit must not unmap the library's code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // With this soname, a program that later loads the driver library by its soname gets this library, not a second one.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
