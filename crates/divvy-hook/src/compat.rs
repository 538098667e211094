//! CUDA's forward compatibility: the use of an image's own libcuda, if it is made for the host's driver or newer.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use divvy_oci::hook::compat::{self, LIBCUDA};

use crate::error::{Error, Result};
use crate::root::Root;

/// Report whether the directory contains exactly one libcuda, and it should be preferred to the libcuda of the host's driver. A
/// note in the library lists the drivers that it supports. A library without a note is preferred if its major version is newer.
pub(crate) fn is_wanted(root: &Root, directory: &str, host_driver: &str) -> Result<bool> {
    let names = root.names(directory)?;
    let Some(version) = compat::version(&names) else {
        return Ok(false);
    };
    let path = format!("{directory}/{LIBCUDA}{version}");
    let Some(file) = root.file(&path)? else { return Ok(false) };
    let made_for = drivers(&file).map_err(|error| Error::image("read", &path, error))?;
    Ok(compat::is_wanted(version, made_for.as_deref(), host_driver))
}

/// The path of a directory list for `ldconfig`. Its name sorts before all others, so the directory stays first if `ldconfig`
/// rebuilds the cache.
const CONFIG: &str = "/etc/ld.so.conf.d/00-divvy-cuda-compat.conf";
const CONFIG_LIMIT: usize = 4096;

/// Record, for later hooks, the directory with the preferred libcuda, or that there is none.
pub(crate) fn remember(root: &Root, directory: Option<&str>) -> Result<()> {
    let there = root.read(CONFIG, CONFIG_LIMIT)?;
    let text = directory.map_or_else(String::new, |directory| format!("{directory}\n"));
    match there {
        None if text.is_empty() => Ok(()),
        Some(there) if there == text.as_bytes() => Ok(()),
        _ => root.write(CONFIG, text.as_bytes()),
    }
}

/// Return the directory that an earlier hook recorded.
pub(crate) fn remembered(root: &Root) -> Result<Option<String>> {
    let text = root
        .read(CONFIG, CONFIG_LIMIT)?
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let directory = text.map(|text| text.trim().to_owned());
    Ok(directory.filter(|directory| directory.starts_with('/') && !directory.contains('\n')))
}

fn drivers(file: &File) -> std::io::Result<Option<Vec<u64>>> {
    let size = file.metadata()?.len();
    compat::drivers(size, |at, length| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    })
}
