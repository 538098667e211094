//! `/etc/ld.so.cache`: the paths of libraries, as `ldconfig` found them in a root directory.
//!
//! There are two formats (glibc, `sysdeps/generic/dl-cache.h`): the old one of libc5 and early glibc, and the new one. A file has the old format, the
//! new format, or the old format followed by the new one. The file may come from a driver container, so it is untrusted input: every offset is
//! checked, and the strings are borrowed from the file.
//!
//! [`with`] writes a cache that has the entries of an image's cache and the libraries that are mounted into the container.

mod write;

use thiserror::Error as ThisError;

/// Why a file cannot be used as a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum LdCacheError {
    /// The file has neither format.
    #[error("it does not begin like an ld.so.cache")]
    NotACache,
    /// The file is shorter than its header states.
    #[error("it is truncated: its header announces more entries than it has")]
    Truncated,
    /// A machine with the other byte order wrote the file.
    #[error("a big-endian machine wrote it")]
    BigEndian,
    /// An entry's offset is outside the file, or the bytes at that offset are not a string. Contains the index of the entry.
    #[error("entry {0} does not point to a string")]
    Entry(usize),
    /// The extensions after the entries are malformed.
    #[error("its header does not point to its extensions")]
    Extension,
}

pub use write::{flags_of, with};

/// An entry of the cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CachedLibrary<'a> {
    /// The library's name (soname), such as `libcuda.so.1`.
    pub name: &'a str,
    /// The library's path, such as `/lib/x86_64-linux-gnu/libcuda.so.1`.
    pub path: &'a str,
    /// The architecture and the kind of libc, see [`CachedLibrary::is_64_bit`].
    pub flags: i32,
    /// The oldest kernel that the library runs on. Only old versions of glibc set it; otherwise 0.
    pub os_version: u32,
    /// The CPU features that the library needs, 0 for none.
    pub hwcap: u64,
}

/// The maximum number of bytes that are read from a cache.
pub const LIMIT: usize = 16 * 1024 * 1024;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const NEW_HEADER: usize = 48;
const NEW_ENTRY: usize = 24;
/// The offset of the byte order in the new header. The byte order is 0 in older files, 2 for little-endian, 3 for big-endian.
const NEW_ORDER: usize = 28;
/// The maximum length of a string in bytes; the kernel's `PATH_MAX`.
const LONGEST: usize = 4096;

impl CachedLibrary<'_> {
    /// Report whether the library is for x86-64 or 64-bit Arm. The flags' upper byte is the architecture, and the lower byte is the kind of libc.
    pub fn is_64_bit(&self) -> bool {
        matches!(self.flags & 0xff00, 0x0300 | 0x0a00)
    }
}

/// Return all entries in the order of the file.
///
/// # Errors
/// See [`LdCacheError`]. If one entry is malformed, the whole file is rejected.
pub fn parse(bytes: &[u8]) -> Result<Vec<CachedLibrary<'_>>, LdCacheError> {
    match part(bytes)? {
        CachePart::New(bytes, count) => entries(bytes, NEW_HEADER, NEW_ENTRY, count, bytes),
        CachePart::Old(count, texts) => entries(bytes, OLD_HEADER, OLD_ENTRY, count, texts),
    }
}

/// The part of a file that is read, with its number of entries.
enum CachePart<'a> {
    /// The new format. Offsets of strings count from the beginning of this slice.
    New(&'a [u8], usize),
    /// The old format. The slice has the strings after the entries.
    Old(usize, &'a [u8]),
}

fn part(bytes: &[u8]) -> Result<CachePart<'_>, LdCacheError> {
    if bytes.starts_with(NEW_MAGIC) {
        return new_format(bytes);
    }
    if !bytes.starts_with(OLD_MAGIC) {
        return Err(LdCacheError::NotACache);
    }
    let count = number(bytes, OLD_MAGIC.len() + 1).ok_or(LdCacheError::Truncated)?;
    let end = count
        .checked_mul(OLD_ENTRY)
        .and_then(|size| size.checked_add(OLD_HEADER))
        .filter(|end| *end <= bytes.len())
        .ok_or(LdCacheError::Truncated)?;
    // A new-format cache after the old one begins at a multiple of 8 bytes, the alignment of its 64-bit fields.
    if let Some(rest) = bytes
        .get(end.next_multiple_of(8)..)
        .filter(|rest| rest.starts_with(NEW_MAGIC))
    {
        return new_format(rest);
    }
    Ok(CachePart::Old(count, bytes.get(end..).unwrap_or_default()))
}

fn new_format(bytes: &[u8]) -> Result<CachePart<'_>, LdCacheError> {
    let count = number(bytes, NEW_MAGIC.len()).ok_or(LdCacheError::Truncated)?;
    if bytes.get(NEW_ORDER).is_some_and(|order| order & 3 == 3) {
        return Err(LdCacheError::BigEndian);
    }
    count
        .checked_mul(NEW_ENTRY)
        .and_then(|size| size.checked_add(NEW_HEADER))
        .filter(|end| *end <= bytes.len())
        .ok_or(LdCacheError::Truncated)?;
    Ok(CachePart::New(bytes, count))
}

fn entries<'a>(
    bytes: &'a [u8],
    from: usize,
    size: usize,
    count: usize,
    texts: &'a [u8],
) -> Result<Vec<CachedLibrary<'a>>, LdCacheError> {
    let is_new = size == NEW_ENTRY;
    let mut libraries = Vec::with_capacity(count);
    for i in 0..count {
        let at = from + i * size;
        let library = || {
            let flags = number(bytes, at)?;
            Some(CachedLibrary {
                name: text(texts, number(bytes, at + 4)?)?,
                path: text(texts, number(bytes, at + 8)?)?,
                flags: u32::try_from(flags).ok()?.cast_signed(),
                os_version: if is_new {
                    u32::try_from(number(bytes, at + 12)?).ok()?
                } else {
                    0
                },
                hwcap: if is_new {
                    u64::from_le_bytes(*bytes.get(at + 16..)?.first_chunk()?)
                } else {
                    0
                },
            })
        };
        libraries.push(library().ok_or(LdCacheError::Entry(i))?);
    }
    Ok(libraries)
}

fn number(bytes: &[u8], at: usize) -> Option<usize> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    usize::try_from(u32::from_le_bytes(*bytes)).ok()
}

fn text(texts: &[u8], at: usize) -> Option<&str> {
    let rest = texts.get(at..)?;
    let rest = &rest[..rest.len().min(LONGEST)];
    let end = rest.iter().position(|byte| *byte == 0)?;
    std::str::from_utf8(&rest[..end]).ok()
}
