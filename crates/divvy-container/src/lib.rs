//! CDI specs and what surrounds a container: text in, text out.
//!
//! No file is opened here; the callers decide where a text comes from and where it goes.

#![forbid(unsafe_code)]

pub mod cdi;
pub mod engines;
pub mod hook;
pub mod runtime;
