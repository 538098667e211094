//! Symbols that find the addresses of symbols.

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr::null;
use std::sync::OnceLock;

use super::pointer::{Out, TextPointer};
use super::symbols::{SymbolAddress, symbols};
use super::{array, context, copy, device, entry, graph, library, memory, pool, share, vmm, work};
use crate::codes::{CuCode, INVALID_VALUE, NOT_FOUND};
use crate::driver;
use crate::lookup::{FoundSymbol, find};
use crate::trace::is_left_out;

symbols! {
    // The symbol of CUDA 11.3, which has no status: what is not there is an error.
    bare cuGetProcAddress(symbol: TextPointer, pointer: Out<SymbolAddress>, version: c_int, flags: u64) || {
        match look_up(symbol, pointer, version, flags)? {
            FoundSymbol::Symbol(_) => Ok(()),
            FoundSymbol::Unknown | FoundSymbol::TooNew => Err(NOT_FOUND),
        }
    };

    // The symbol of CUDA 12.0: what is not there is a NULL pointer, and the status says why.
    bare cuGetProcAddress_v2(symbol: TextPointer, pointer: Out<SymbolAddress>, version: c_int, flags: u64, status: Out<c_int>) || {
        let found = look_up(symbol, pointer, version, flags)?;
        status.put_if_present(match found {
            FoundSymbol::Symbol(_) => 0,
            FoundSymbol::Unknown => 1,
            FoundSymbol::TooNew => 2,
        });
        Ok(())
    };
}

/// Return all symbols, with their addresses.
fn every_symbol() -> Vec<(&'static str, SymbolAddress)> {
    [
        all(),
        entry::all(),
        device::all(),
        context::all(),
        memory::all(),
        copy::all(),
        vmm::all(),
        pool::all(),
        array::all(),
        graph::all(),
        library::all(),
        work::all(),
        share::all(),
    ]
    .concat()
}

/// Write the address of the symbol that a program of this CUDA version means.
fn look_up(symbol: TextPointer, pointer: Out<SymbolAddress>, version: c_int, flags: u64) -> Result<FoundSymbol, CuCode> {
    static ADDRESSES: OnceLock<HashMap<&'static str, usize>> = OnceLock::new();
    let name = symbol.get()?;
    pointer.present()?;
    let driver = driver::version()?;
    // CU_GET_PROC_ADDRESS_LEGACY_STREAM and CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM.
    if version > driver || flags > 3 {
        return Err(INVALID_VALUE);
    }
    let all = || {
        every_symbol()
            .into_iter()
            .map(|(name, address)| (name, address.addr()))
            .collect()
    };
    let addresses = ADDRESSES.get_or_init(all);
    let found = match find(name, version, driver, flags & 2 != 0) {
        FoundSymbol::Symbol(_) if is_left_out(name) => FoundSymbol::Unknown,
        found => found,
    };
    let address = match found {
        FoundSymbol::Symbol(symbol) => addresses.get(symbol).copied(),
        FoundSymbol::Unknown | FoundSymbol::TooNew => None,
    };
    pointer.put(address.map_or(null(), std::ptr::with_exposed_provenance))?;
    Ok(found)
}
