//! CUDA's forward compatibility: the use of an image's own libcuda, if it is made for the host's driver or newer.
//!
//! In a container with Divvy's guard, the guard takes the place of this libcuda as well, and the guard's real library becomes this libcuda. Then programs have
//! the driver library that they would have without the guard, and are held to their pod's share.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use divvy_oci::hook::compat::{self, LIBCUDA};
use divvy_share::{GUARD_CUDA, REAL_CUDA};

use crate::error::{Error, Result};
use crate::root::ImageRoot;

/// Return the directory if it contains exactly one libcuda, and this one should be preferred to the libcuda of the host's driver. A
/// note in the library lists the drivers that it supports. A library without a note is preferred if its major version is newer.
///
/// With the guard among the container's mounts, the guard is put over this libcuda. If this fails, the second result is the error, and the image's libcuda is not
/// preferred, because nothing would hold programs that use it to their share.
pub(crate) fn choose(
    root: &ImageRoot,
    mounts: &[String],
    directory: String,
    host_driver: &str,
) -> Result<(Option<String>, Result<()>)> {
    let names = root.names(&directory)?;
    let Some(version) = compat::version(&names) else {
        return Ok((None, Ok(())));
    };
    let path = format!("{directory}/{LIBCUDA}{version}");
    let Some(file) = root.file(&path)? else {
        return Ok((None, Ok(())));
    };
    let made_for = drivers(&file).map_err(|error| Error::image("read", &path, error))?;
    let is_guarded = mounts.iter().any(|mount| mount == REAL_CUDA);
    if is_guarded && is_guard(root, &path)? {
        // An earlier hook has chosen it, and what is there now has no note.
        return Ok((Some(directory), Ok(())));
    }
    if !compat::is_wanted(version, made_for.as_deref(), host_driver) {
        return Ok((None, Ok(())));
    }
    let held = if is_guarded {
        hold(root, &directory, &path, &names)
    } else {
        Ok(())
    };
    Ok((held.is_ok().then_some(directory), held))
}

fn is_guard(root: &ImageRoot, path: &str) -> Result<bool> {
    let Some(guard) = root.mounted(GUARD_CUDA)? else {
        return Ok(false);
    };
    root.has(path, &guard)
}

/// Make this libcuda the guard's real library, and put the guard over it and over each other copy of it in its directory.
fn hold(root: &ImageRoot, directory: &str, path: &str, names: &[String]) -> Result<()> {
    let mounted = |path: &str| root.mounted(path)?.ok_or_else(|| missing(path, "it is not mounted there"));
    let (guard, real) = (mounted(GUARD_CUDA)?, mounted(REAL_CUDA)?);
    // A hook must not cover a file that the container runtime trusts, such as one of /proc.
    let of_image = |path: &str| {
        root.place(path)?
            .ok_or_else(|| missing(path, "it is not a file of the image itself"))
    };
    let own = of_image(path)?;
    real.cover_with(&own)?;
    own.cover_with(&guard)?;
    for name in names.iter().filter(|name| name.starts_with("libcuda.so")) {
        let other = format!("{directory}/{name}");
        // Links to the libcuda lead to the guard now.
        if !is_guard(root, &other)? {
            of_image(&other)?.cover_with(&guard)?;
        }
    }
    Ok(())
}

fn missing(path: &str, why: &str) -> Error {
    Error::image("mount Divvy's guard over", path, io::Error::other(why))
}

/// The path of a directory list for `ldconfig`. Its name sorts before all others, so the directory stays first if `ldconfig`
/// rebuilds the cache.
const CONFIG: &str = "/etc/ld.so.conf.d/00-divvy-cuda-compat.conf";
const CONFIG_LIMIT: usize = 4096;

/// Record, for later hooks, the directory with the preferred libcuda, or that there is none.
pub(crate) fn remember(root: &ImageRoot, directory: Option<&str>) -> Result<()> {
    let there = root.read(CONFIG, CONFIG_LIMIT)?;
    let text = directory.map_or_else(String::new, |directory| format!("{directory}\n"));
    match there {
        None if text.is_empty() => Ok(()),
        Some(there) if there == text.as_bytes() => Ok(()),
        _ => root.write(CONFIG, text.as_bytes()),
    }
}

/// Return the directory that an earlier hook recorded.
pub(crate) fn remembered(root: &ImageRoot) -> Result<Option<String>> {
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
