//! Finds the real OCI runtime and `nvidia-container-cli`.

use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use divvy_oci::runtime::settings::NvidiaCliSettings;

use crate::error::Error;

/// The directories that are searched after those in `PATH`, because engines do not always set `PATH`.
const DIRECTORIES: [&str; 6] = ["/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin"];

/// Return the path of the first candidate that exists. A candidate with a slash is a path; any other candidate is the name of a
/// program.
pub(crate) fn find(candidates: &[String]) -> Result<PathBuf, Error> {
    let found = candidates.iter().find_map(|name| program(name, "/"));
    found.ok_or_else(|| Error::NoRuntime(candidates.to_vec()))
}

/// Find `nvidia-container-cli` for mode `legacy`: at the path in the settings, or in the usual directories, first within the
/// driver's root. `missing` gets the places that were searched.
pub(crate) fn nvidia_container_cli(settings: &NvidiaCliSettings, missing: fn(String) -> Error) -> Result<String, Error> {
    let name = settings
        .path
        .as_deref()
        .filter(|path| !path.is_empty())
        .unwrap_or("nvidia-container-cli");
    let root = settings.root.as_deref().filter(|root| !root.is_empty()).unwrap_or("/");
    let found = program(name, root).and_then(|path| path.into_os_string().into_string().ok());
    found.ok_or_else(|| {
        missing(if name.contains('/') {
            name.to_owned()
        } else {
            DIRECTORIES.join(", ")
        })
    })
}

fn program(name: &str, root: &str) -> Option<PathBuf> {
    let own = std::env::current_exe().ok().and_then(|path| path.canonicalize().ok());
    let is_it = |path: &PathBuf| is_other_program(path, own.as_deref());
    if name.contains('/') {
        return Some(PathBuf::from(name)).filter(is_it);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let directories: Vec<PathBuf> = std::env::split_paths(&path).chain(DIRECTORIES.map(PathBuf::from)).collect();
    // A driver container has its own copy of the program.
    let below = |directory: &PathBuf| Path::new(root).join(directory.strip_prefix("/").unwrap_or(directory));
    let of_root = directories.iter().map(below).filter(|_| root != "/");
    of_root
        .chain(directories.iter().cloned())
        .map(|directory| directory.join(name))
        .find(is_it)
}

/// Report whether the path is an executable program other than this one. Without this check, this program would execute itself
/// indefinitely if it were installed as `runc`.
fn is_other_program(path: &Path, own: Option<&Path>) -> bool {
    let executable = std::fs::metadata(path).is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0);
    executable && path.canonicalize().ok().as_deref() != own
}

/// Replace this process with the real runtime, with the same arguments and environment. This function returns only if that fails.
pub(crate) fn become_it(runtime: &Path, words: &[OsString]) -> Error {
    let error = Command::new(runtime).arg0(OsStr::new(runtime)).args(words).exec();
    Error::Exec {
        runtime: runtime.to_owned(),
        source: error,
    }
}
