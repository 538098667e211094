//! Updates the container's `/etc/ld.so.cache` with the libraries that are mounted into the container.
//!
//! This module writes the cache's format itself. It runs neither the image's `ldconfig` (CVE-2025-23267) nor the host's.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;

use divvy_cdi::generate::ldcache::{self, CachedLibrary};
use divvy_oci::hook::libraries::{musl_list, stem};
use divvy_oci::hook::soname::soname;

use crate::error::{Error, Result};
use crate::root::ImageRoot;

const CACHE: &str = "/etc/ld.so.cache";
/// The number of bytes at the beginning of an ELF file that identify its architecture.
const HEADER: usize = 20;

/// The maximum size in bytes of the directory list of musl's loader.
const MUSL_LIMIT: usize = 64 * 1024;

/// Add the libraries that are mounted into these directories to the cache. A library is listed under its file name, its soname,
/// and the names of links next to it that differ only in the version. All libraries in the directory `first`, mounted or not,
/// come before them.
pub(crate) fn update(root: &ImageRoot, mounts: &[String], directories: &[String], first: Option<&str>) -> Result<()> {
    let mut found: Vec<(String, String, i32)> = Vec::new();
    let mut with_libraries: Vec<&str> = Vec::new();
    for (directory, mounted_only) in first
        .map(|directory| (directory, false))
        .into_iter()
        .chain(directories.iter().map(|directory| (directory.as_str(), true)))
    {
        let directory = directory.trim_end_matches('/');
        let mounted: BTreeSet<&str> = mounts
            .iter()
            .filter_map(|path| stem(path.strip_prefix(directory)?.strip_prefix('/')?))
            .collect();
        if mounted.is_empty() && mounted_only {
            continue;
        }
        with_libraries.push(directory);
        let mut names = root.names(directory)?;
        for path in mounts {
            let name = path.strip_prefix(directory).and_then(|rest| rest.strip_prefix('/'));
            // Create the link that ldconfig would create. NVIDIA's specs mount a library only under its long name. They also add
            // links to a short name, which does not exist.
            if let Some(name) = name.filter(|name| stem(name).is_some())
                && let Some(short) = soname_of(root, path, name)?.filter(|short| !names.contains(short))
            {
                root.link(name, &format!("{directory}/{short}"))?;
                names.push(short);
            }
        }
        for name in names {
            let path = format!("{directory}/{name}");
            if stem(&name).is_some_and(|stem| mounted.contains(stem) || !mounted_only)
                && let Some(header) = root.read(&path, HEADER)?
                && let Some(flags) = ldcache::flags_of(&header)
            {
                found.push((name, path, flags));
            }
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    for_musl(root, &with_libraries)?;
    let before = root.read(CACHE, ldcache::LIMIT)?;
    let added: Vec<CachedLibrary<'_>> = found
        .iter()
        .map(|(name, path, flags)| CachedLibrary {
            name,
            path,
            flags: *flags,
            os_version: 0,
            hwcap: 0,
        })
        .collect();
    // A loader does not use an invalid cache either, so replace it with a new one.
    let after = ldcache::with(before.as_deref(), &added).or_else(|_| ldcache::with(None, &added));
    let after = after.map_err(|error| Error::image("write", CACHE, std::io::Error::other(error)))?;
    if before.is_some_and(|before| before == after) {
        return Ok(());
    }
    root.write(CACHE, &after)
}

fn soname_of(root: &ImageRoot, path: &str, name: &str) -> Result<Option<String>> {
    let Some(file) = root.file(path)? else { return Ok(None) };
    let unread = |error| Error::image("read", path, error);
    let size = file.metadata().map_err(unread)?.len();
    let read = |at, length| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at).map(|()| bytes)
    };
    soname(name, size, read).map_err(unread)
}

/// Add the directories to the list of musl's loader, if the image has that loader.
fn for_musl(root: &ImageRoot, directories: &[&str]) -> Result<()> {
    let arch = std::env::consts::ARCH;
    if root.file(&format!("/lib/ld-musl-{arch}.so.1"))?.is_none() {
        return Ok(());
    }
    let path = format!("/etc/ld-musl-{arch}.path");
    let there = root.read(&path, MUSL_LIMIT)?.and_then(|bytes| String::from_utf8(bytes).ok());
    let list = musl_list(there.as_deref(), directories);
    if there.as_ref() == Some(&list) {
        Ok(())
    } else {
        root.write(&path, list.as_bytes())
    }
}
