//! The container's `/etc/ld.so.cache`, with the libraries that were mounted into the container.
//!
//! Written here, by what the format is, and not by the image's `ldconfig` (CVE-2025-23267) nor the host's.

use std::collections::BTreeSet;

use divvy_container::cdi::generate::ldcache::{self, Library};

use crate::error::{Error, Result};
use crate::root::Root;

const CACHE: &str = "/etc/ld.so.cache";
/// Of an ELF file, what tells the machine that it is for.
const HEADER: usize = 20;

/// Adds what is mounted into these folders, and the links beside it that lead to it by another version of its name.
pub(crate) fn update(root: &Root, mounts: &[String], folders: &[String]) -> Result<()> {
    let mut found: Vec<(String, String, i32)> = Vec::new();
    for folder in folders {
        let folder = folder.trim_end_matches('/');
        let mounted: BTreeSet<&str> = mounts
            .iter()
            .filter_map(|path| stem(path.strip_prefix(folder)?.strip_prefix('/')?))
            .collect();
        if mounted.is_empty() {
            continue;
        }
        for name in root.names(folder)? {
            let path = format!("{folder}/{name}");
            if stem(&name).is_some_and(|stem| mounted.contains(stem))
                && let Some(header) = root.read(&path, HEADER)?
                && let Some(flags) = ldcache::flags_of(&header)
            {
                found.push((name, path, flags));
            }
        }
    }
    let added: Vec<Library<'_>> = found
        .iter()
        .map(|(name, path, flags)| Library {
            name,
            path,
            flags: *flags,
            os_version: 0,
            hwcap: 0,
        })
        .collect();
    if added.is_empty() {
        return Ok(());
    }
    let before = root.read(CACHE, ldcache::LIMIT)?;
    // What is no cache no loader uses either: one that is whole takes its place.
    let after = ldcache::with(before.as_deref(), &added).or_else(|_| ldcache::with(None, &added));
    let after = after.map_err(|error| Error::image("write", CACHE, std::io::Error::other(error)))?;
    if before.is_some_and(|before| before == after) {
        return Ok(());
    }
    root.write(CACHE, &after)
}

/// `libcuda` of `libcuda.so.1`
fn stem(name: &str) -> Option<&str> {
    let (stem, rest) = name.split_once(".so")?;
    let is_library = !stem.contains('/') && (rest.is_empty() || rest.starts_with('.'));
    (is_library && !rest.contains('/')).then_some(stem)
}
