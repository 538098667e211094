//! Symbols that find the addresses of symbols.

use std::collections::HashMap;
use std::ffi::c_int;
use std::ptr::null;
use std::sync::OnceLock;

use super::pointer::{Out, Text};
use super::symbols::{Address, symbols};
use super::{array, context, copy, device, entry, graph, library, memory, pool, share, vmm, work};
use crate::codes::{Code, INVALID_VALUE, NOT_FOUND};
use crate::driver;
use crate::lookup::{Found, find};
use crate::trace::is_left_out;

symbols! {
    // The symbol of CUDA 11.3, which has no status: what is not there is an error.
    bare cuGetProcAddress(symbol: Text, pointer: Out<Address>, version: c_int, flags: u64) || {
        match look_up(symbol, pointer, version, flags)? {
            Found::Symbol(_) => Ok(()),
            Found::Unknown | Found::TooNew => Err(NOT_FOUND),
        }
    };

    // The symbol of CUDA 12.0: what is not there is a NULL pointer, and the status says why.
    bare cuGetProcAddress_v2(symbol: Text, pointer: Out<Address>, version: c_int, flags: u64, status: Out<c_int>) || {
        let found = look_up(symbol, pointer, version, flags)?;
        status.put_if_present(match found {
            Found::Symbol(_) => 0,
            Found::Unknown => 1,
            Found::TooNew => 2,
        });
        Ok(())
    };
}

/// Return all symbols, with their addresses.
fn every_symbol() -> Vec<(&'static str, Address)> {
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
fn look_up(symbol: Text, pointer: Out<Address>, version: c_int, flags: u64) -> Result<Found, Code> {
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
        Found::Symbol(_) if is_left_out(name) => Found::Unknown,
        found => found,
    };
    let address = match found {
        Found::Symbol(symbol) => addresses.get(symbol).copied(),
        Found::Unknown | Found::TooNew => None,
    };
    pointer.put(address.map_or(null(), std::ptr::with_exposed_provenance))?;
    Ok(found)
}
