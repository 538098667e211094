//! CUDA's forward compatibility: an image's own libcuda, where it is newer than the machine's driver and made for it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use divvy_container::hook::compat::{self, LIBCUDA};

use crate::error::{Error, Result};
use crate::root::Root;

/// Where NVIDIA's images have it.
pub(crate) const FOLDER: &str = "/usr/local/cuda/compat";

/// Whether the folder has one libcuda, and it is to be used in place of the driver's of the machine. An image says for which drivers its library is
/// made; where it does not, a newer major version is.
pub(crate) fn is_wanted(root: &Root, folder: &str, host_driver: &str) -> Result<bool> {
    let names = root.names(folder)?;
    let Some(version) = compat::version(&names) else {
        return Ok(false);
    };
    let path = format!("{folder}/{LIBCUDA}{version}");
    let Some(file) = root.file(&path)? else { return Ok(false) };
    let made_for = drivers(&file).map_err(|error| Error::image("read", &path, error))?;
    Ok(compat::is_wanted(version, made_for.as_deref(), host_driver))
}

fn drivers(file: &File) -> std::io::Result<Option<Vec<u64>>> {
    let size = file.metadata()?.len();
    compat::drivers(size, |at, length| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    })
}
