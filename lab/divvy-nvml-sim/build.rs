//! Linker options of the simulated driver library.

fn main() {
    // A thread serves the control socket, so `dlclose` after a failed nvmlInit must not unmap the library's code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // With this soname, a program that later loads the driver library by its soname gets this library, not a second one.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    // The library's calls of its own functions reach these, even if a test hides a function from programs.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
