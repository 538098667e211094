//! What the tests of the shadow libraries (`divvy-guard`, `divvy-guard-nvml`, `divvy-guard-audit`) and of the simulated driver need.
//!
//! The library under test is the one that ships: only the paths in it are replaced, by others of the same length.

#![allow(clippy::unwrap_used, reason = "tests")]

mod container;
mod elf;
mod worker;

use std::collections::BTreeMap;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, PoisonError};

pub use container::{CONTEXT, GPUS, MIB, ShadowContainer, limits};
pub use elf::Elf;
pub use worker::RequestWorker;

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

/// Build something in the profile in which the test was built. Return the directory of that profile.
fn build_alike(arguments: &[&str]) -> PathBuf {
    let directory = beside();
    let profile = match directory.file_name().and_then(|name| name.to_str()).unwrap() {
        "debug" => "dev",
        name => name,
    };
    build(&[&["--profile", profile][..], arguments].concat());
    directory
}

/// The directory with the libraries and programs of the profile in which the test was built.
fn beside() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors().nth(2).unwrap().to_owned()
}

/// Build a package in the profile in which the test was built. Return the directory with its libraries and programs.
pub fn built(package: &str) -> PathBuf {
    build_alike(&["-p", package])
}

/// A package's program or library in the profile in which the test was built. It is built if it does not exist.
pub fn existing(package: &str, file: &str) -> PathBuf {
    let path = beside().join(file);
    if !path.exists() {
        built(package);
    }
    path
}

/// Make something once in a process: cargo takes a moment even if it has nothing to do.
fn once<T: ?Sized + 'static>(all: &Mutex<BTreeMap<String, &'static T>>, name: &str, make: impl FnOnce() -> Box<T>) -> &'static T {
    let mut all = all.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(&made) = all.get(name) {
        return made;
    }
    let made: &'static T = Box::leak(make());
    all.insert(name.to_owned(), made);
    made
}

static PATHS: Mutex<BTreeMap<String, &'static Path>> = Mutex::new(BTreeMap::new());
static SHADOWS: Mutex<BTreeMap<String, &'static [u8]>> = Mutex::new(BTreeMap::new());

fn library_of(package: &str) -> String {
    format!("lib{}.so", package.replace('-', "_"))
}

/// Build a package's library in the profile in which the test was built. Return its path.
pub fn library(package: &str) -> &'static Path {
    once(&PATHS, package, || built(package).join(library_of(package)).into_boxed_path())
}

/// Build a program of a package's examples in the profile in which the test was built. Return its path.
pub fn example(package: &str, name: &str) -> &'static Path {
    once(&PATHS, &format!("{package} {name}"), || {
        let directory = build_alike(&["-p", package, "--example", name]);
        directory.join("examples").join(name).into_boxed_path()
    })
}

/// The library of a package as it ships.
pub fn shadow(package: &str) -> &'static [u8] {
    once(&SHADOWS, package, || {
        build(&["--profile", "node", "-p", package, "--features", "shadow"]);
        let library = std::fs::read(target().join("node").join(library_of(package)));
        library.unwrap().into_boxed_slice()
    })
}

/// Compile C.
pub fn compile(source: &str, to: &Path, arguments: &[&str]) {
    let mut compiler = Command::new("cc");
    compiler
        .args(["-w", "-x", "c", "-", "-x", "none", "-o"])
        .arg(to)
        .args(arguments);
    let mut compiler = compiler.stdin(Stdio::piped()).spawn().unwrap();
    compiler.stdin.take().unwrap().write_all(source.as_bytes()).unwrap();
    assert!(compiler.wait().unwrap().success(), "{arguments:?}");
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
