//! `/etc/ld.so.cache`: which library is where, as `ldconfig` of that root wrote it down.
//!
//! Two formats (glibc, `sysdeps/generic/dl-cache.h`): the old one of libc5 and early glibc, and the new one, which stands alone or behind
//! an old one in the same file. The file is a driver container's, so it is read as outside input: nothing is copied, every offset is checked.
//! [`with`] writes one: what an image's has, and libraries that were mounted into the container.

mod write;

use thiserror::Error as ThisError;

/// Why a file is no cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ThisError)]
pub enum Error {
    /// Neither format.
    #[error("it does not begin like an ld.so.cache")]
    NotACache,
    /// It ends before what it announces.
    #[error("it is truncated: its header announces more entries than it has")]
    Truncated,
    /// Written by a machine of the other byte order.
    #[error("a big-endian machine wrote it")]
    BigEndian,
    /// An entry leads out of the file, or to no text.
    #[error("entry {0} does not point to a string")]
    Entry(usize),
    /// The part behind the entries makes no sense.
    #[error("its header does not point to its extensions")]
    Extension,
}

pub use write::{flags_of, with};

/// One library.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Library<'a> {
    /// `libcuda.so.1`
    pub name: &'a str,
    /// `/lib/x86_64-linux-gnu/libcuda.so.1`
    pub path: &'a str,
    /// For which machine, see [`Library::is_64_bit`].
    pub flags: i32,
    /// The oldest kernel that it runs on, where old glibcs wrote that down.
    pub os_version: u32,
    /// Which processors it is for; 0 for all.
    pub hwcap: u64,
}

/// The most of a cache that is read.
pub const LIMIT: usize = 16 * 1024 * 1024;

const OLD_MAGIC: &[u8] = b"ld.so-1.7.0";
const OLD_HEADER: usize = 16;
const OLD_ENTRY: usize = 12;
const NEW_MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const NEW_HEADER: usize = 48;
const NEW_ENTRY: usize = 24;
/// The new header's byte that says the byte order: 0 in older files, 2 little, 3 big.
const NEW_ORDER: usize = 28;
/// Longer than any path.
const LONGEST: usize = 4096;

impl Library<'_> {
    /// Whether it is for x86-64 or 64-bit ARM: the upper byte of the flags is the architecture, the lower one the kind of libc.
    pub fn is_64_bit(&self) -> bool {
        matches!(self.flags & 0xff00, 0x0300 | 0x0a00)
    }
}

/// The libraries, in the order of the file.
///
/// # Errors
/// See [`Error`]; nothing of a file that is wrong in one place is used.
pub fn parse(bytes: &[u8]) -> Result<Vec<Library<'_>>, Error> {
    match part(bytes)? {
        Part::New(bytes, count) => entries(bytes, NEW_HEADER, NEW_ENTRY, count, bytes),
        Part::Old(count, texts) => entries(bytes, OLD_HEADER, OLD_ENTRY, count, texts),
    }
}

/// The part of a file that counts, and how many entries it has.
enum Part<'a> {
    /// Offsets of texts count from its beginning.
    New(&'a [u8], usize),
    /// The texts behind the entries.
    Old(usize, &'a [u8]),
}

fn part(bytes: &[u8]) -> Result<Part<'_>, Error> {
    if bytes.starts_with(NEW_MAGIC) {
        return new_format(bytes);
    }
    if !bytes.starts_with(OLD_MAGIC) {
        return Err(Error::NotACache);
    }
    let count = number(bytes, OLD_MAGIC.len() + 1).ok_or(Error::Truncated)?;
    let end = count
        .checked_mul(OLD_ENTRY)
        .and_then(|size| size.checked_add(OLD_HEADER))
        .filter(|end| *end <= bytes.len())
        .ok_or(Error::Truncated)?;
    // The new format behind the old one begins where a structure with 64-bit numbers may.
    if let Some(rest) = bytes
        .get(end.next_multiple_of(8)..)
        .filter(|rest| rest.starts_with(NEW_MAGIC))
    {
        return new_format(rest);
    }
    Ok(Part::Old(count, bytes.get(end..).unwrap_or_default()))
}

fn new_format(bytes: &[u8]) -> Result<Part<'_>, Error> {
    let count = number(bytes, NEW_MAGIC.len()).ok_or(Error::Truncated)?;
    if bytes.get(NEW_ORDER).is_some_and(|order| order & 3 == 3) {
        return Err(Error::BigEndian);
    }
    count
        .checked_mul(NEW_ENTRY)
        .and_then(|size| size.checked_add(NEW_HEADER))
        .filter(|end| *end <= bytes.len())
        .ok_or(Error::Truncated)?;
    Ok(Part::New(bytes, count))
}

fn entries<'a>(bytes: &'a [u8], from: usize, size: usize, count: usize, texts: &'a [u8]) -> Result<Vec<Library<'a>>, Error> {
    let is_new = size == NEW_ENTRY;
    let mut libraries = Vec::with_capacity(count);
    for i in 0..count {
        let at = from + i * size;
        let library = || {
            let flags = number(bytes, at)?;
            Some(Library {
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
        libraries.push(library().ok_or(Error::Entry(i))?);
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
