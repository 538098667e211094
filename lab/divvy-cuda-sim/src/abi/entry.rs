//! Symbols for the start: initialization, versions, errors, and the addresses of symbols.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_uint};
use std::ptr::null;
use std::sync::OnceLock;

use super::pointer::{Out, Text};
use super::{Address, symbols};
use crate::codes::{Code, INVALID_VALUE, NOT_FOUND, describe};
use crate::driver;
use crate::names::{Found, find};

symbols! {
    bare cuInit(flags: c_uint) || match flags {
        0 => driver::init(),
        _ => Err(INVALID_VALUE),
    };

    bare cuDriverGetVersion(version: Out<c_int>) || {
        version.present()?;
        version.put(driver::version()?)
    };

    bare cuGetErrorName(error: c_int, name: Out<*const c_char>) || {
        let known = describe(error);
        name.put(known.map_or(null(), |(name, _)| name.as_ptr()))?;
        known.map(drop).ok_or(INVALID_VALUE)
    };

    bare cuGetErrorString(error: c_int, text: Out<*const c_char>) || {
        let known = describe(error);
        text.put(known.map_or(null(), |(_, text)| text.as_ptr()))?;
        known.map(drop).ok_or(INVALID_VALUE)
    };

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
    let all = || super::all().into_iter().map(|(name, address)| (name, address.addr())).collect();
    let addresses = ADDRESSES.get_or_init(all);
    let found = find(name, version, driver, flags & 2 != 0);
    let address = match found {
        Found::Symbol(symbol) => addresses.get(symbol).copied(),
        Found::Unknown | Found::TooNew => None,
    };
    pointer.put(address.map_or(null(), std::ptr::with_exposed_provenance))?;
    Ok(found)
}
