//! Symbols for the start: initialization, versions, and errors.

use std::ffi::{c_char, c_int, c_uint};
use std::ptr::null;

use super::pointer::Out;
use super::symbols::symbols;
use crate::codes::{INVALID_VALUE, describe};
use crate::driver;

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
}
