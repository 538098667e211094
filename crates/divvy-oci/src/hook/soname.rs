//! The name by which programs refer to a library, read from the library itself (`DT_SONAME`).
//!
//! `ldconfig` creates a link with this name next to each library. Specs of NVIDIA's generator rely on these links.

use super::compat::number;
use super::libraries::stem;

/// The maximum number of program headers. No library of a driver has more.
const MOST_HEADERS: u64 = 100;
const MOST_BYTES: u64 = 64 * 1024;
const LONGEST: u64 = 255;

/// Return the library's soname if it differs from the file's name only in the version. Otherwise, or if the file is not a 64-bit
/// ELF file, the result is `None`. `size` is the size of the file in bytes. `read` takes a position and a number of bytes, and
/// returns these bytes; this function never reads beyond the end.
///
/// # Errors
/// Returns the errors of `read`.
pub fn soname<E>(name: &str, size: u64, mut read: impl FnMut(u64, usize) -> Result<Vec<u8>, E>) -> Result<Option<String>, E> {
    let mut part = |at: u64, length: u64| match usize::try_from(length) {
        Ok(bytes) if length <= MOST_BYTES && at.checked_add(length).is_some_and(|end| end <= size) => read(at, bytes).map(Some),
        _ => Ok(None),
    };
    let found = text(&mut part, size)?;
    let found = found.and_then(|bytes| String::from_utf8(bytes.split(|byte| *byte == 0).next()?.to_vec()).ok());
    Ok(found.filter(|found| found != name && stem(found).is_some() && stem(found) == stem(name)))
}

/// Return the bytes from the beginning of the soname on (little-endian ELF-64: System V ABI, chapter 5).
fn text<E>(part: &mut impl FnMut(u64, u64) -> Result<Option<Vec<u8>>, E>, size: u64) -> Result<Option<Vec<u8>>, E> {
    let Some(header) = part(0, 64)?.filter(|header| header.starts_with(b"\x7fELF\x02\x01")) else {
        return Ok(None);
    };
    let of_header = |at, length| number(&header, at, length).unwrap_or_default();
    let (start, each, count) = (of_header(32, 8), of_header(54, 2), of_header(56, 2));
    let Some(table) = part(start, each.saturating_mul(count))?.filter(|_| each >= 56 && count <= MOST_HEADERS) else {
        return Ok(None);
    };
    // Each segment has a type, a position in the file, an address, and a length in the file.
    let segment = |index: u64| {
        let entry = table.get(usize::try_from(index.checked_mul(each)?).ok()?..)?;
        Some((
            number(entry, 0, 4)?,
            number(entry, 8, 8)?,
            number(entry, 16, 8)?,
            number(entry, 32, 8)?,
        ))
    };
    let segments: Vec<(u64, u64, u64, u64)> = (0..count).filter_map(segment).collect();
    const LOAD: u64 = 1;
    const DYNAMIC: u64 = 2;
    let Some((_, at, _, length)) = segments.iter().find(|segment| segment.0 == DYNAMIC) else {
        return Ok(None);
    };
    let Some(dynamic) = part(*at, *length)? else { return Ok(None) };
    const STRTAB: u64 = 5;
    const SONAME: u64 = 14;
    let value = |tag: u64| {
        let mut entries = dynamic.chunks_exact(16);
        entries
            .find(|entry| number(entry, 0, 8) == Some(tag))
            .and_then(|entry| number(entry, 8, 8))
    };
    let in_file = |address: u64| {
        let holds = |segment: &&(u64, u64, u64, u64)| {
            segment.0 == LOAD && address.checked_sub(segment.2).is_some_and(|offset| offset < segment.3)
        };
        let (_, at, from, _) = segments.iter().find(holds)?;
        at.checked_add(address - from)
    };
    let place = value(STRTAB)
        .zip(value(SONAME))
        .and_then(|(strings, name)| in_file(strings)?.checked_add(name));
    match place.and_then(|at| Some((at, size.checked_sub(at)?.min(LONGEST)))) {
        Some((at, length)) => part(at, length),
        None => Ok(None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Build a library whose string table has the address 0x1000 and the file position 0x200.
    fn library(soname: &str) -> Vec<u8> {
        let mut bytes = vec![0_u8; 0x200];
        let mut put =
            |at: usize, value: u64, length: usize| bytes[at..at + length].copy_from_slice(&value.to_le_bytes()[..length]);
        put(0, 0x0001_0102_464c_457f, 8);
        put(32, 64, 8);
        put(54, 56, 2);
        put(56, 2, 2);
        for (at, [kind, offset, address, length]) in [(64, [1, 0x200, 0x1000, 0x100]), (120, [2, 0x180, 0x180, 48])] {
            put(at, kind, 4);
            put(at + 8, offset, 8);
            put(at + 16, address, 8);
            put(at + 32, length, 8);
        }
        for (at, tag, value) in [(0x180, 5, 0x1000), (0x190, 14, 1), (0x1a0, 0, 0)] {
            put(at, tag, 8);
            put(at + 8, value, 8);
        }
        bytes.push(0);
        bytes.extend(soname.as_bytes());
        bytes.push(0);
        bytes.resize(0x300, b'x');
        bytes
    }

    fn of(name: &str, bytes: &[u8]) -> Option<String> {
        let read = |at: u64, length: usize| {
            let at = usize::try_from(at).expect("small");
            Ok::<_, std::convert::Infallible>(bytes[at..at + length].to_vec())
        };
        soname(name, bytes.len() as u64, read).unwrap_or_else(|never| match never {})
    }

    #[test]
    fn a_library_says_by_what_name_it_is_asked_for() {
        let name = "libcuda.so.550.54.15";
        for (said, found) in [
            ("libcuda.so.1", Some("libcuda.so.1")),
            (name, None),
            ("libc.so.6", None),
            ("../libcuda.so.1", None),
            ("libcuda.so.1/x", None),
            ("", None),
        ] {
            assert_eq!(of(name, &library(said)).as_deref(), found, "{said}");
        }
    }

    #[test]
    fn what_is_broken_says_nothing_and_is_read_to_its_end_at_most() {
        let whole = library("libcuda.so.1");
        for end in 0..whole.len() {
            let found = of("libcuda.so.2", &whole[..end]);
            assert!(found.is_none_or(|name| "libcuda.so.1".starts_with(&name)), "{end}");
        }
        for at in 0..0x200 {
            for value in [0, 1, 0x7f, 0xff] {
                let mut broken = whole.clone();
                broken[at] = value;
                let _ = of("libcuda.so.2", &broken);
            }
        }
    }
}
