//! CUDA's forward compatibility: which host drivers an image's own libcuda supports.
//!
//! The library's ELF note `.note.cuda.fwd_compatibility` is a JSON object. Its list `Driver` contains major driver versions.

use serde::Deserialize;

/// The prefix of the library's file name, which is followed by the version.
pub const LIBCUDA: &str = "libcuda.so.";
/// The directory of the library in NVIDIA's images.
pub const DIRECTORY: &str = "/usr/local/cuda/compat";
/// The maximum number of sections of an ELF file. No libcuda has more sections, or a name table or note larger than `MOST_BYTES`.
const MOST_SECTIONS: u64 = 1000;
const MOST_BYTES: u64 = 64 * 1024;
const SECTION: &[u8] = b".note.cuda.fwd_compatibility\0";

/// Return the version in the file name of a directory's only libcuda. The result is `None` if there are several or none.
pub fn version(names: &[String]) -> Option<&str> {
    let mut versions = names
        .iter()
        .filter_map(|name| name.strip_prefix(LIBCUDA).filter(|version| version.contains('.')));
    versions.next().filter(|_| versions.next().is_none())
}

/// Report whether the image's library should be preferred to the library of the host's driver. `made_for` contains the driver
/// versions in the library's note. A library without a note is preferred if its major version is newer than the driver's.
pub fn is_wanted(version: &str, made_for: Option<&[u64]>, host_driver: &str) -> bool {
    let Some(host) = major(host_driver) else { return false };
    match made_for {
        Some(drivers) => drivers.contains(&host),
        None => major(version).is_some_and(|own| own > host),
    }
}

fn major(version: &str) -> Option<u64> {
    version.split('.').next()?.parse().ok()
}

#[derive(Deserialize)]
struct DriverNote {
    #[serde(rename = "Driver")]
    driver: Vec<u64>,
}

/// Return the major driver versions in a library's note. The result is `None` if there is no note, or if the file is not a 64-bit
/// ELF file. `size` is the size of the file in bytes. `read` takes a position and a number of bytes, and returns these bytes;
/// this function never reads beyond the end.
///
/// # Errors
/// Returns the errors of `read`.
pub fn drivers<E>(size: u64, mut read: impl FnMut(u64, usize) -> Result<Vec<u8>, E>) -> Result<Option<Vec<u64>>, E> {
    let mut part = |at: u64, length: u64| match usize::try_from(length) {
        Ok(bytes) if length <= MOST_BYTES && at.checked_add(length).is_some_and(|end| end <= size) => read(at, bytes).map(Some),
        _ => Ok(None),
    };
    Ok(section(&mut part)?.and_then(|note| of_note(&note)))
}

/// Parse an ELF note (`Elf64_Nhdr`): the sizes of the name and the description, the type, and then both texts, each padded to a
/// multiple of four bytes.
fn of_note(note: &[u8]) -> Option<Vec<u64>> {
    let size = |at: usize| usize::try_from(number(note, at, 4)?).ok();
    let (name, text) = (size(0)?, size(4)?);
    let start = 12usize.checked_add(name.checked_next_multiple_of(4)?)?;
    let of_nvidia = note.get(12..12usize.checked_add(name)?)?;
    let text = note.get(start..start.checked_add(text)?)?;
    let is_end = |byte: &u8| *byte == 0;
    let of_nvidia = of_nvidia.split(is_end).next()?;
    let text = text.split(is_end).next()?;
    let note: DriverNote = serde_json::from_slice(text)
        .ok()
        .filter(|_| of_nvidia == b"NVIDIA Corporation")?;
    Some(note.driver)
}

/// Return the bytes of the section with the note (little-endian ELF-64: System V ABI, chapter 4).
fn section<E>(part: &mut impl FnMut(u64, u64) -> Result<Option<Vec<u8>>, E>) -> Result<Option<Vec<u8>>, E> {
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
        let from = usize::try_from(name).ok().and_then(|at| names.get(at..));
        from.is_some_and(|from| from.starts_with(SECTION))
    };
    match (0..count).filter_map(place).find(|(name, ..)| has_name(*name)) {
        Some((_, at, length)) => part(at, length),
        None => Ok(None),
    }
}

pub(super) fn number(bytes: &[u8], at: usize, length: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(length)?)?;
    Some(bytes.iter().rev().fold(0, |number, byte| number << 8 | u64::from(*byte)))
}
