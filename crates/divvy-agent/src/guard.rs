//! The guard's files on the node: the libraries, and for each pod and GPU what the pod may use and what its processes use.
//!
//! | file in the state directory | content |
//! |---|---|
//! | `guard/<digest>/libcuda.so.1`, `libnvidia-ml.so.1`, `libdivvy-guard-audit.so` | the libraries. Another version has another directory, so the files of a running container never change |
//! | `shares/<pod's UID>/<GPU's UUID>/limits` | the pod's share ([`divvy_share::limits`]), which only the agent writes |
//! | `shares/<pod's UID>/<GPU's UUID>/usage` | what the processes use ([`divvy_share::usage`]), which the pod writes |
//!
//! Containers have the files mounted. Therefore the agent changes them in place, and never replaces them. It changes the size of `usage` only back to
//! what it was.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use divvy_agent_core::{Guard, Reaction};
use sha2::{Digest as _, Sha256};

use crate::args::GuardMode;
use crate::files::{self, FileError};

mod share_files;
mod shares;
#[cfg(test)]
mod tests;

pub(crate) use shares::{Shares, escaped, processes_of};

/// The libraries as they come with the agent, and the names under which containers know them.
const LIBRARIES: [(&str, &str); 2] = [
    ("libdivvy-guard.so", "libcuda.so.1"),
    ("libdivvy-guard-nvml.so", "libnvidia-ml.so.1"),
];
/// The library for [`GuardMode::Both`], which has one name.
const AUDIT: &str = "libdivvy-guard-audit.so";
/// A library that is larger is not the guard.
const LIBRARY_LIMIT: u64 = 1024 * 1024;

/// Copy the libraries for a mode from a directory to the state directory, where containers can have them mounted. Return the paths of the guard's files.
///
/// # Errors
/// A library cannot be read, or a copy cannot be written.
pub(crate) fn install(state: &Path, from: &Path, mode: GuardMode) -> Result<Guard, FileError> {
    let mut contents = Vec::new();
    let mut digest = Sha256::new();
    let has_audit = mode == GuardMode::Both;
    for (file, name) in LIBRARIES.into_iter().chain(has_audit.then_some((AUDIT, AUDIT))) {
        let content = read_library(&from.join(file))?;
        digest.update(&content);
        contents.push((name, content));
    }
    let mut directory = state.join("guard");
    let mut version = String::new();
    for byte in &digest.finalize()[..8] {
        // Writing to a String cannot fail.
        let _ = write!(version, "{byte:02x}");
    }
    directory.push(version);
    files::make_directory(&directory, 0o755)?;
    for (name, content) in &contents {
        if std::fs::read(directory.join(name)).is_ok_and(|present| present == *content) {
            continue;
        }
        files::write_atomic(&directory, name, content, 0o755)?;
    }
    let [cuda, nvml] = LIBRARIES.map(|(_, name)| directory.join(name).display().to_string());
    Ok(Guard {
        cuda,
        nvml,
        audit: has_audit.then(|| directory.join(AUDIT).display().to_string()),
        shares: shares(state).display().to_string(),
        reaction: Reaction::Event,
    })
}

fn read_library(path: &Path) -> Result<Vec<u8>, FileError> {
    let failed = |action, source| FileError {
        action,
        path: path.to_owned(),
        source,
    };
    let mut content = Vec::new();
    let file = File::open(path).map_err(|source| failed("read", source))?;
    let read = file.take(LIBRARY_LIMIT + 1).read_to_end(&mut content);
    if read.map_err(|source| failed("read", source))? as u64 > LIBRARY_LIMIT {
        let text = format!("it is larger than {LIBRARY_LIMIT} bytes, so it is not Divvy's guard");
        return Err(failed("use", io::Error::new(io::ErrorKind::InvalidData, text)));
    }
    Ok(content)
}

/// Return the directory of the pods' files.
pub(crate) fn shares(state: &Path) -> PathBuf {
    state.join("shares")
}
