//! CUDA's forward compatibility: an image's own libcuda, where it is newer than the machine's driver and made for it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;

use serde::Deserialize;

use crate::error::{Error, Result};
use crate::root::Root;

/// Where NVIDIA's images have it.
pub(crate) const FOLDER: &str = "/usr/local/cuda/compat";
const LIBCUDA: &str = "libcuda.so.";
/// Of an ELF file: more sections than this, or a larger table of names or note, no libcuda has.
const MOST_SECTIONS: u64 = 1000;
const MOST_BYTES: u64 = 64 * 1024;

/// Whether the folder has one libcuda, and it is to be used in place of the driver's of the machine. An image says for which drivers its library is
/// made (ELF note `.note.cuda.fwd_compatibility`, a JSON object with a list `Driver`); where it does not, a newer major version is.
pub(crate) fn is_wanted(root: &Root, folder: &str, host_driver: &str) -> Result<bool> {
    let names = root.names(folder)?;
    let versions: Vec<&str> = names
        .iter()
        .filter_map(|name| name.strip_prefix(LIBCUDA).filter(|version| version.contains('.')))
        .collect();
    let ([version], Some(host)) = (&versions[..], major(host_driver)) else {
        return Ok(false);
    };
    let path = format!("{folder}/{LIBCUDA}{version}");
    let Some(file) = root.file(&path)? else { return Ok(false) };
    let drivers = drivers(&file).map_err(|error| Error::image("read", &path, error))?;
    Ok(match drivers {
        Some(drivers) => drivers.contains(&host),
        None => major(version).is_some_and(|own| own > host),
    })
}

fn major(version: &str) -> Option<u64> {
    version.split('.').next()?.parse().ok()
}

#[derive(Deserialize)]
struct Note {
    #[serde(rename = "Driver")]
    driver: Vec<u64>,
}

/// Major versions of the drivers for which the library is made, if it says so. What is no ELF file for 64 bits says nothing.
fn drivers(file: &File) -> std::io::Result<Option<Vec<u64>>> {
    let Some(note) = section(file, ".note.cuda.fwd_compatibility")? else {
        return Ok(None);
    };
    let drivers = || {
        let size = |at: usize| usize::try_from(number(&note, at, 4)?).ok();
        let (name, text) = (size(0)?, size(4)?);
        let start = 12usize.checked_add(name.checked_next_multiple_of(4)?)?;
        let of_nvidia = note.get(12..12usize.checked_add(name)?)?;
        let text = note.get(start..start.checked_add(text)?)?;
        let is_end = |byte: &u8| *byte == 0;
        let of_nvidia = of_nvidia.split(is_end).next()?;
        let text = text.split(is_end).next()?;
        let note: Note = serde_json::from_slice(text)
            .ok()
            .filter(|_| of_nvidia == b"NVIDIA Corporation")?;
        Some(note.driver)
    };
    Ok(drivers())
}

/// The bytes of a section by its name (ELF-64, little-endian: System V ABI, chapter 4).
fn section(file: &File, wanted: &str) -> std::io::Result<Option<Vec<u8>>> {
    let size = file.metadata()?.len();
    let part = |at: u64, length: u64| -> std::io::Result<Option<Vec<u8>>> {
        if length > MOST_BYTES || at.checked_add(length).is_none_or(|end| end > size) {
            return Ok(None);
        }
        let mut bytes = vec![0; usize::try_from(length).unwrap_or_default()];
        file.read_exact_at(&mut bytes, at)?;
        Ok(Some(bytes))
    };
    let Some(header) = part(0, 64)?.filter(|header| header.starts_with(b"\x7fELF\x02\x01")) else {
        return Ok(None);
    };
    let of_header = |at, length| number(&header, at, length).unwrap_or_default();
    let (start, each, count, names) = (of_header(40, 8), of_header(58, 2), of_header(60, 2), of_header(62, 2));
    let Some(table) = part(start, each.saturating_mul(count))?.filter(|_| each >= 64 && count <= MOST_SECTIONS) else {
        return Ok(None);
    };
    let place = |index: u64| {
        let at = usize::try_from(index.checked_mul(each)?).ok()?;
        let entry = table.get(at..)?;
        Some((number(entry, 0, 4)?, number(entry, 24, 8)?, number(entry, 32, 8)?))
    };
    let Some((_, at, length)) = place(names) else {
        return Ok(None);
    };
    let Some(names) = part(at, length)? else { return Ok(None) };
    let has_name = |name: u64| {
        let from = usize::try_from(name).ok().and_then(|at| names.get(at..)).unwrap_or_default();
        from.split(|byte| *byte == 0).next() == Some(wanted.as_bytes())
    };
    match (0..count).filter_map(place).find(|(name, ..)| has_name(*name)) {
        Some((_, at, length)) => part(at, length),
        None => Ok(None),
    }
}

fn number(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}
