//! The runtime behind this one.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Error;

/// Searched after `PATH`, which engines do not always set.
const FOLDERS: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// The first of the candidates that is there; one with a slash is a path.
pub(crate) fn find(candidates: &[String]) -> Result<PathBuf, Error> {
    let found = candidates.iter().find_map(|name| program(name));
    found.ok_or_else(|| Error::NoRuntime(candidates.to_vec()))
}

/// NVIDIA's program for mode legacy: where the settings say, or where programs are.
pub(crate) fn nvidia_container_cli(path: Option<&str>) -> Result<String, Error> {
    let name = path.filter(|path| !path.is_empty()).unwrap_or("nvidia-container-cli");
    let found = program(name).and_then(|path| path.into_os_string().into_string().ok());
    found.ok_or_else(|| {
        Error::NoCli(if name.contains('/') {
            name.to_owned()
        } else {
            FOLDERS.join(", ")
        })
    })
}

fn program(name: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok().and_then(|path| path.canonicalize().ok());
    let is_it = |path: &PathBuf| is_other_program(path, own.as_deref());
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(is_it);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders: Vec<PathBuf> = std::env::split_paths(&path).chain(FOLDERS.map(PathBuf::from)).collect();
    folders.iter().map(|folder| folder.join(name)).find(is_it)
}

/// A program that may be run, and is not this one: under the name of runc it would call itself for ever.
fn is_other_program(path: &Path, own: Option<&Path>) -> bool {
    let executable = std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    executable && path.canonicalize().ok().as_deref() != own
}

/// Goes on as the real runtime: same words, same environment, its output and its status.
pub(crate) fn become_it(runtime: &Path, words: &[OsString]) -> Error {
    let error = Command::new(runtime).arg0(OsStr::new(runtime)).args(words).exec();
    Error::Exec {
        runtime: runtime.to_owned(),
        source: error,
    }
}
