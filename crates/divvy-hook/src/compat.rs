//! CUDA's forward compatibility: an image's own libcuda, where it is newer than the machine's driver and made for it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use divvy_oci::hook::compat::{self, LIBCUDA};

use crate::error::{Error, Result};
use crate::root::Root;

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

/// A list of folders of `ldconfig`, before all others by its name: so the folder stays in front when somebody makes the cache again.
const CONFIG: &str = "/etc/ld.so.conf.d/00-divvy-cuda-compat.conf";
const CONFIG_LIMIT: usize = 4096;

/// Notes the folder for the hooks that come after, or that there is none.
pub(crate) fn remember(root: &Root, folder: Option<&str>) -> Result<()> {
    let there = root.read(CONFIG, CONFIG_LIMIT)?;
    let text = folder.map_or_else(String::new, |folder| format!("{folder}\n"));
    match there {
        None if text.is_empty() => Ok(()),
        Some(there) if there == text.as_bytes() => Ok(()),
        _ => root.write(CONFIG, text.as_bytes()),
    }
}

/// The folder that a hook before this one noted.
pub(crate) fn remembered(root: &Root) -> Result<Option<String>> {
    let text = root
        .read(CONFIG, CONFIG_LIMIT)?
        .and_then(|bytes| String::from_utf8(bytes).ok());
    let folder = text.map(|text| text.trim().to_owned());
    Ok(folder.filter(|folder| folder.starts_with('/') && !folder.contains('\n')))
}

fn drivers(file: &File) -> std::io::Result<Option<Vec<u64>>> {
    let size = file.metadata()?.len();
    compat::drivers(size, |at, length| {
        let mut bytes = vec![0; length];
        file.read_exact_at(&mut bytes, at)?;
        Ok(bytes)
    })
}
