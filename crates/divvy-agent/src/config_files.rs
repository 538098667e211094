//! A directory of configuration files, which is usually a mounted ConfigMap.

use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::path::Path;

use divvy_nvidia_config::Available;

/// The maximum size of a configuration file in bytes, which is the limit of a ConfigMap.
pub(crate) const BYTES: u64 = 1 << 20;

/// The maximum number of names that a message lists.
const MOST_NAMES: usize = 10;

/// Return the files of a directory that can be chosen.
pub(crate) fn available(directory: &Path) -> io::Result<Available> {
    let mut entries = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        // A label cannot have a name that is not text. The files of a ConfigMap are symbolic links, so links are followed.
        if let Ok(name) = entry.file_name().into_string() {
            let is_file = fs::metadata(entry.path()).is_ok_and(|about| about.is_file());
            entries.push((name, is_file));
        }
    }
    Ok(Available::of(entries))
}

/// Read a file. The content of a device, such as `/dev/null`, is empty.
///
/// # Errors
/// Fails also if the file is larger than [`BYTES`].
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    if fs::metadata(path)?.is_file() {
        fs::File::open(path)?.take(BYTES + 1).read_to_end(&mut content)?;
    }
    if content.len() as u64 > BYTES {
        Err(io::Error::new(
            ErrorKind::InvalidData,
            "it is larger than 1 MiB; make it smaller, or choose another file",
        ))
    } else {
        Ok(content)
    }
}

/// Say what the operator can do about a node whose label names no usable file: `choose`, such as `Choose`, one of the names.
pub(crate) fn advice(choose: &str, available: &Available, directory: &Path, node: &str, label: &str) -> String {
    let names: Vec<&str> = available.names().collect();
    if names.is_empty() {
        return format!("Put configuration files into {}", directory.display());
    }
    let listed = names.iter().take(MOST_NAMES).copied().collect::<Vec<_>>().join(", ");
    let more = match names.len().saturating_sub(MOST_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    format!("{choose} one of {listed}{more}: kubectl label node {node} {label}=NAME --overwrite")
}
