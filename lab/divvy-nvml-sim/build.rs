//! Linker options of the simulated driver library.

fn main() {
    // The library keeps a thread for its control socket: `dlclose` after a failed nvmlInit must not unmap its code.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // A program that asks for the driver library by its soname afterwards gets this one, not a second copy.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnvidia-ml.so.1");
    println!("cargo::rerun-if-changed=build.rs");
}
