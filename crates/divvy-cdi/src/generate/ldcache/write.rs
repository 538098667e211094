//! Writes a cache in the new format (glibc 2.39, `elf/cache.c` and `sysdeps/generic/dl-cache.h`).

use std::cmp::{Ordering, Reverse};
use std::collections::BTreeMap;

use super::{CachePart, CachedLibrary, LdCacheError, NEW_HEADER, NEW_MAGIC, number, part, text};

/// The offset of the field in the new header that points to the extensions.
const EXTENSIONS: usize = 32;
const EXTENSIONS_MAGIC: u32 = 0xeaa4_2174;
/// The tag of the extension that lists the subdirectories of `glibc-hwcaps`. Entries refer to them by index.
const HWCAPS: u32 = 1;
/// The maximum number of extensions that are accepted; more than any version of glibc writes.
const MOST_EXTENSIONS: usize = 64;
/// The header's value for little-endian.
const ORDER: u8 = 2;

/// Return a cache with the entries of `before` and `added`. The loader finds added libraries before existing ones of the same name. An existing entry
/// of the same name and path is replaced, so a second call changes nothing.
///
/// # Errors
/// Fails if `before` is not a valid cache.
pub fn with(before: Option<&[u8]>, added: &[CachedLibrary<'_>]) -> Result<Vec<u8>, LdCacheError> {
    let mut libraries: Vec<CachedLibrary<'_>> = added.to_vec();
    let mut hwcaps = Vec::new();
    if let Some(bytes) = before {
        let is_new = |old: &CachedLibrary<'_>| !added.iter().any(|new| (new.name, new.path) == (old.name, old.path));
        libraries.extend(super::parse(bytes)?.into_iter().filter(is_new));
        hwcaps = self::hwcaps(bytes)?;
    }
    // The sort is stable, so an added library stays before the others of its name. The loader takes the first one.
    libraries.sort_by(|a, b| in_order(a.name, b.name));
    Ok(written(&libraries, &hwcaps))
}

/// Return the flags for a library, given at least the first 20 bytes of its file. Return `None` unless it is a 64-bit ELF file for x86-64 or Arm.
pub fn flags_of(header: &[u8]) -> Option<i32> {
    match (header.get(..5)?, header.get(18..20)?) {
        (b"\x7fELF\x02", [0x3e, 0]) => Some(0x0303),
        (b"\x7fELF\x02", [0xb7, 0]) => Some(0x0a03),
        _ => None,
    }
}

/// Return the subdirectories of `glibc-hwcaps` that a cache lists.
fn hwcaps(bytes: &[u8]) -> Result<Vec<&str>, LdCacheError> {
    let CachePart::New(bytes, _) = part(bytes)? else {
        return Ok(Vec::new());
    };
    // Old versions of glibc write no extensions and leave the offset 0.
    let Some(at) = number(bytes, EXTENSIONS).filter(|at| *at != 0) else {
        return Ok(Vec::new());
    };
    let found = || {
        let is_it = bytes.get(at..)?.starts_with(&EXTENSIONS_MAGIC.to_le_bytes());
        let count = number(bytes, at + 4).filter(|count| is_it && *count <= MOST_EXTENSIONS)?;
        let mut names = Vec::new();
        for section in (0..count).map(|i| at + 8 + i * 16) {
            if number(bytes, section)? != usize::try_from(HWCAPS).ok()? {
                continue;
            }
            let (from, size) = (number(bytes, section + 8)?, number(bytes, section + 12)?);
            let list = bytes.get(from..from.checked_add(size)?)?;
            for i in 0..list.len() / 4 {
                names.push(text(bytes, number(list, i * 4)?)?);
            }
        }
        Some(names)
    };
    found().ok_or(LdCacheError::Extension)
}

/// Compare names for the order of the cache. The loader does a binary search in a list that descends by `_dl_cache_libcmp`, which compares runs of
/// digits as numbers.
fn in_order(a: &str, b: &str) -> Ordering {
    Reverse(parts(a)).cmp(&Reverse(parts(b)))
}

/// Split a name into numbers and other bytes, as sort keys. Numbers sort after other bytes, and the end of a name sorts before everything.
fn parts(name: &str) -> Vec<(bool, u64)> {
    let mut parts: Vec<(bool, u64)> = Vec::new();
    let mut in_number = false;
    for byte in name.bytes() {
        let digit = u64::from(byte.wrapping_sub(b'0'));
        match parts.last_mut() {
            Some((_, number)) if in_number && byte.is_ascii_digit() => *number = number.saturating_mul(10).saturating_add(digit),
            _ if byte.is_ascii_digit() => parts.push((true, digit)),
            _ => parts.push((false, u64::from(byte))),
        }
        in_number = byte.is_ascii_digit();
    }
    parts
}

/// The string table: each string once, with its offset.
#[derive(Default)]
struct StringTable<'a> {
    bytes: Vec<u8>,
    at: BTreeMap<&'a str, usize>,
}

impl<'a> StringTable<'a> {
    fn put(&mut self, text: &'a str) -> usize {
        *self.at.entry(text).or_insert_with(|| {
            let at = self.bytes.len();
            self.bytes.extend(text.as_bytes());
            self.bytes.push(0);
            at
        })
    }
}

fn written(libraries: &[CachedLibrary<'_>], hwcaps: &[&str]) -> Vec<u8> {
    let mut texts = StringTable::default();
    let texts_from = NEW_HEADER + libraries.len() * super::NEW_ENTRY;
    let mut entries = Vec::new();
    for library in libraries {
        entries.extend(library.flags.to_le_bytes());
        for text in [library.name, library.path] {
            entries.extend(small(texts_from + texts.put(text)));
        }
        entries.extend(library.os_version.to_le_bytes());
        entries.extend(library.hwcap.to_le_bytes());
    }
    let directories: Vec<[u8; 4]> = hwcaps.iter().map(|name| small(texts_from + texts.put(name))).collect();
    let extensions = if directories.is_empty() {
        0
    } else {
        (texts_from + texts.bytes.len()).next_multiple_of(4)
    };
    let mut file = NEW_MAGIC.to_vec();
    file.extend(small(libraries.len()));
    file.extend(small(texts.bytes.len()));
    file.extend([ORDER, 0, 0, 0]);
    file.extend(small(extensions));
    file.resize(NEW_HEADER, 0);
    file.extend(entries);
    file.extend(texts.bytes);
    if extensions != 0 {
        file.resize(extensions, 0);
        file.extend(EXTENSIONS_MAGIC.to_le_bytes());
        file.extend(small(1));
        file.extend(HWCAPS.to_le_bytes());
        file.extend(small(0));
        file.extend(small(extensions + 8 + 16));
        file.extend(small(directories.len() * 4));
        file.extend(directories.concat());
    }
    file
}

/// Encode an offset or size. It always fits: what was read is below [`super::LIMIT`], and a driver adds only a few libraries.
fn small(number: usize) -> [u8; 4] {
    u32::try_from(number).expect("a cache of less than 4 GiB").to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fall_as_the_loader_searches_them() {
        let falling = [
            "libz.so.1",
            "libc.so.10",
            "libc.so.6",
            "libc.so",
            "liba2.so",
            "liba.so.1",
            "lib",
        ];
        for pair in falling.windows(2) {
            assert_eq!(in_order(pair[0], pair[1]), Ordering::Less, "{pair:?}");
            assert_eq!(in_order(pair[1], pair[0]), Ordering::Greater, "{pair:?}");
        }
        assert_eq!(in_order("libc.so.06", "libc.so.6"), Ordering::Equal, "as numbers");
    }
}
