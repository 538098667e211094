//! The only way to skip a test.
//!
//! libtest reports a test that returns early as passed and hides its output. Therefore a test that cannot run on this machine calls
//! [`skipped`], or a check of this crate that calls it, such as [`program`], and then returns:
//!
//! ```no_run
//! # fn test() {
//! if !divvy_skip::program("strace", "strace") {
//!     return;
//! }
//! # }
//! ```
//!
//! Each skip is one line, `NAME<TAB>REASON`, appended to the file that the environment variable `DIVVY_SKIPS` names. `cargo xtask test` sets
//! the variable, and prints and counts the skips at the end; `.ci/run` fails on any skip that `.ci/skips` does not list. Without the
//! variable, the line goes to standard error, where libtest does not capture it. With `DIVVY_NO_SKIP=1`, a skip fails the test.

#![forbid(unsafe_code)]

use std::ffi::OsStr;
use std::fmt::Display;
use std::fs::OpenOptions;
use std::io::{self, Write as _};
use std::panic::Location;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The environment variable that names the file to which skips are appended.
pub const FILE: &str = "DIVVY_SKIPS";
/// The environment variable that turns every skip into a failure.
pub const REFUSED: &str = "DIVVY_NO_SKIP";

/// The environment variable that says for which processor, other than this machine's, an emulator runs the tests, such as `arm64`.
pub const EMULATED: &str = "DIVVY_EMULATED";

/// The length to which a reason is cut: it is often a program's output, of which one line is enough.
const MOST: usize = 300;

/// Record that the running test, or a part of it, is skipped.
///
/// # Panics
///
/// With `DIVVY_NO_SKIP=1`, and if the record cannot be written.
#[track_caller]
pub fn skipped(reason: impl Display) {
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let mut name = name(&package, std::thread::current().name(), Location::caller());
    if let Some(processor) = std::env::var(EMULATED).ok().filter(|_| is_set(EMULATED)) {
        name.insert_str(0, &format!("{processor}::"));
    }
    if let Err(error) = step(&name, reason) {
        panic!("{error}");
    }
}

/// Report whether an emulator runs this test, and record the skip if so. The name of the skip starts with the emulated architecture (`arm64::`), because the test
/// runs on real machines of every architecture.
///
/// # Panics
///
/// As [`skipped`].
#[track_caller]
pub fn emulated(reason: impl Display) -> bool {
    let is_emulated = is_set(EMULATED);
    if is_emulated {
        skipped(reason);
    }
    is_emulated
}

/// Record that a step other than a test is skipped, for example a run of the suite.
///
/// # Errors
///
/// With `DIVVY_NO_SKIP=1`, and if the record cannot be written.
pub fn step(name: &str, reason: impl Display) -> io::Result<()> {
    let line = line(name, &reason.to_string());
    if is_set(REFUSED) {
        let shown = line.trim_end().replace('\t', ": ");
        return Err(io::Error::other(format!(
            "{REFUSED} is set, but this would be skipped: {shown}"
        )));
    }
    match std::env::var_os(FILE).filter(|file| !file.is_empty()) {
        Some(file) => append(Path::new(&file), &line),
        None => io::stderr().write_all(format!("skipped: {line}").as_bytes()),
    }
}

/// Return the directory that an environment variable names. If the variable is not set, record the skip and return `None`.
#[track_caller]
pub fn directory(variable: &str, content: &str) -> Option<PathBuf> {
    let directory = std::env::var_os(variable)
        .filter(|value| !value.is_empty())
        .map(PathBuf::from);
    if directory.is_none() {
        skipped(format_args!("{variable} does not name a directory with {content}"));
    }
    directory
}

/// Report whether this process runs as root. If not, record the skip.
#[track_caller]
pub fn root(purpose: &str) -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let uids = status.lines().find_map(|line| line.strip_prefix("Uid:"));
    let is_root = uids.and_then(|uids| uids.split_whitespace().nth(1)) == Some("0");
    if !is_root {
        skipped(format_args!("only root can do this: {purpose}"));
    }
    is_root
}

/// Report whether a program is available here. If not, record the skip.
#[track_caller]
pub fn program(name: &str, debian_package: &str) -> bool {
    let there = Command::new(name).arg("--version").output().is_ok();
    if !there {
        skipped(format_args!("{name} is not in the PATH (Debian: {debian_package})"));
    }
    there
}

/// Return `PACKAGE::TEST`, behind the processor of an emulator if one runs the test. libtest names a test's thread after the test, unless it runs all tests in the main thread.
fn name(package: &str, thread: Option<&str>, caller: &Location<'_>) -> String {
    match thread.filter(|name| *name != "main") {
        Some(test) => format!("{package}::{test}"),
        None => format!("{package}::{}:{}", caller.file(), caller.line()),
    }
}

fn line(name: &str, reason: &str) -> String {
    let reason: Vec<&str> = reason.split_whitespace().collect();
    let reason: String = reason.join(" ").chars().take(MOST).collect();
    format!("{name}\t{reason}\n")
}

/// Append a line with a single write, because test programs append at the same time.
fn append(file: &Path, line: &str) -> io::Result<()> {
    let opened = OpenOptions::new().create(true).append(true).open(file);
    let failed = |error: io::Error| {
        io::Error::new(
            error.kind(),
            format!("{}, which {FILE} names, cannot be written: {error}", file.display()),
        )
    };
    opened.map_err(failed)?.write_all(line.as_bytes()).map_err(failed)
}

fn is_set(variable: &str) -> bool {
    std::env::var_os(variable).is_some_and(|value| !value.is_empty() && value != OsStr::new("0"))
}

#[cfg(test)]
mod tests;
