//! What the tests of the shadow libraries (`divvy-guard`, `divvy-guard-nvml`) need.
//!
//! The library under test is the one that ships: only the paths in it are replaced, by others of the same length.

#![allow(clippy::unwrap_used, reason = "tests")]

mod elf;

use std::path::PathBuf;
use std::process::Command;

pub use elf::Elf;

/// The directory with cargo's directories of profiles: its target directory, or the one in it for another machine. Only for a test's own process.
pub fn target() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(3).unwrap().to_owned()
}

/// Cargo's target directory.
fn target_directory() -> PathBuf {
    let built = target();
    // The machine for which cargo builds unless an argument says otherwise: <https://doc.rust-lang.org/cargo/reference/config.html#buildtarget>.
    let machine = std::env::var_os("CARGO_BUILD_TARGET");
    match built.parent() {
        Some(directory) if machine.is_some_and(|machine| built.ends_with(machine)) => directory.to_owned(),
        _ => built,
    }
}

/// Build something as `cargo build` with these arguments does.
pub fn build(arguments: &[&str]) {
    // Cargo sets it for a test. What it was when this crate was compiled may be in another checkout, if two of them share a directory for what they build.
    let directory = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    let status = Command::new(env!("CARGO"))
        .args(["build", "--quiet"])
        .args(arguments)
        .arg("--target-dir")
        .arg(target_directory())
        .current_dir(directory)
        .status();
    assert!(status.unwrap().success(), "cargo build {arguments:?}");
}

/// Build a package in the profile in which the test was built. Return the directory with its libraries and programs.
pub fn built(package: &str) -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.ancestors().nth(2).unwrap();
    let profile = match directory.file_name().and_then(|name| name.to_str()).unwrap() {
        "debug" => "dev",
        name => name,
    };
    build(&["--profile", profile, "-p", package]);
    directory.to_owned()
}

/// The library of a package as it ships.
pub fn shadow(package: &str) -> Vec<u8> {
    build(&["--profile", "node", "-p", package, "--features", "shadow"]);
    let file = format!("node/lib{}.so", package.replace('-', "_"));
    std::fs::read(target().join(file)).unwrap()
}

/// Replace a text in a library by another one of the same length. Returns how often it was there.
pub fn replace(library: &mut [u8], from: &str, to: &str) -> usize {
    assert_eq!(from.len(), to.len());
    let mut count = 0;
    for start in 0..library.len().saturating_sub(from.len()) {
        let place = &mut library[start..start + from.len()];
        if place == from.as_bytes() {
            place.copy_from_slice(to.as_bytes());
            count += 1;
        }
    }
    count
}

/// Take symbols from a library: rename them where it has their names. Its hash table still has the hashes of the old names, so the loader finds neither.
pub fn hide(library: &mut [u8], symbols: &[&str]) {
    for text in library.split_mut(|byte| *byte == 0) {
        if symbols.iter().any(|symbol| symbol.as_bytes() == text) {
            text[0] = b'-';
        }
    }
}
