//! Which functions a library has for others. A driver's library has those of its branch, and a simulated one is a single file for all branches.

#![allow(
    unsafe_code,
    reason = "the loader's table of this library's symbols is memory of the loader"
)]

use std::ffi::CStr;
use std::io;
use std::mem::{MaybeUninit, offset_of};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr::NonNull;

use nix::sys::mman::{ProtFlags, mprotect};
use object::elf::{SHT_DYNSYM, Sym64};
use object::read::elf::{ElfFile64, FileHeader as _, SectionHeader as _, Sym as _};
use object::{Endianness, U16, U64};

/// An export that could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The loader does not know the library.
    #[error("the loader knows no library at this address")]
    NoLibrary,
    /// The library's file cannot be read.
    #[error("{0} cannot be read")]
    File(String, #[source] io::Error),
    /// The library's file is not an ELF file of this machine.
    #[error("{0} is not a library for this machine's processor")]
    Format(String, #[source] object::Error),
    /// The memory of the table cannot be written.
    #[error("the table of symbols cannot be written")]
    Memory(#[source] nix::Error),
}

/// Remove exported functions from this library: the loader no longer finds those for which `is_missing` holds. `own` is the address of something in the library. Call
/// it from a constructor, before a program can have looked for a function. What the loader has bound before, as for a program that is linked
/// against the library and binds everything at its start, stays bound.
///
/// # Errors
///
/// The library's own file cannot be read, or its memory cannot be written.
pub fn remove(own: *const (), is_missing: impl Fn(&str) -> bool) -> Result<(), ExportError> {
    let (file, base) = library(own)?;
    let bytes = std::fs::read(Path::new(std::ffi::OsStr::from_bytes(file.to_bytes())));
    let name = || file.to_string_lossy().into_owned();
    let bytes = bytes.map_err(|error| ExportError::File(name(), error))?;
    let places = places(&bytes, is_missing).map_err(|error| ExportError::Format(name(), error))?;
    for place in places {
        hide(base + place).map_err(ExportError::Memory)?;
    }
    Ok(())
}

/// Return the file of the library that has an address, and where the loader has put it.
fn library(own: *const ()) -> Result<(&'static CStr, usize), ExportError> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: the loader only compares the address; `info` is valid for writes, and all zeros are a valid Dl_info.
    let info = unsafe {
        if libc::dladdr(own.cast(), info.as_mut_ptr()) == 0 {
            return Err(ExportError::NoLibrary);
        }
        info.assume_init()
    };
    if info.dli_fname.is_null() {
        return Err(ExportError::NoLibrary);
    }
    // SAFETY: the loader's own name of the library, which it keeps as long as the library is loaded. The caller is in that library.
    let file = unsafe { CStr::from_ptr(info.dli_fname) };
    Ok((file, info.dli_fbase.addr()))
}

/// Return where the symbols are that are missing, counted from the library's beginning.
fn places(bytes: &[u8], is_missing: impl Fn(&str) -> bool) -> Result<Vec<usize>, object::Error> {
    let file = ElfFile64::<Endianness>::parse(bytes)?;
    let endian = file.endian();
    let sections = file.elf_header().sections(endian, bytes)?;
    let symbols = sections.symbols(endian, bytes, SHT_DYNSYM)?;
    let table = sections.section(symbols.section())?.sh_addr(endian);
    let mut places = Vec::new();
    for (index, symbol) in symbols.enumerate() {
        let name = std::str::from_utf8(symbol.name(endian, symbols.strings())?).unwrap_or_default();
        if !symbol.is_undefined(endian) && is_missing(name) {
            places.push(usize::try_from(table).unwrap_or_default() + index.0 * size_of::<Sym64<Endianness>>());
        }
    }
    Ok(places)
}

/// Make a symbol one that the library needs and does not have.
fn hide(symbol: usize) -> Result<(), nix::Error> {
    const SIZE: usize = size_of::<Sym64<Endianness>>();
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE)?;
    let page = page.and_then(|size| usize::try_from(size).ok()).unwrap_or(4096);
    let start = symbol / page * page;
    let length = symbol + SIZE - start;
    let memory = std::ptr::with_exposed_provenance_mut::<u8>(start);
    let Some(memory) = NonNull::new(memory) else { return Ok(()) };
    // SAFETY: the pages are a private mapping of this library's file, in which the loader only reads. They can also be read afterwards.
    unsafe { mprotect(memory.cast(), length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE)? };
    let symbol = std::ptr::with_exposed_provenance_mut::<u8>(symbol);
    // SAFETY: the loader's copy of the symbol, of this size, as the library's file says. Both fields are within it, and the pages were made writable. The loader holds its lock
    // while it runs a constructor, so no other thread searches the table.
    unsafe {
        symbol
            .add(offset_of!(Sym64<Endianness>, st_shndx))
            .cast::<U16<Endianness>>()
            .write_unaligned(U16::new(Endianness::default(), 0));
        symbol
            .add(offset_of!(Sym64<Endianness>, st_value))
            .cast::<U64<Endianness>>()
            .write_unaligned(U64::new(Endianness::default(), 0));
    }
    Ok(())
}
