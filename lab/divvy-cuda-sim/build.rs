//! Linker options of the simulated driver library.

fn main() {
    // Programs and the libraries above this one find the driver by its soname.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // Pointers to the library's functions must not become invalid, as with the real driver.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,nodelete");
    // The library's pointers to its own functions are those functions, even if a library above it has functions of the same names.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed=build.rs");
}
