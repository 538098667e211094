//! CDI specs and what surrounds a container: text in, text out.
//!
//! No file is opened here; the callers decide where a text comes from and where it goes.

#![forbid(unsafe_code)]

pub mod cdi;
pub mod engines;
pub mod hook;
mod plain;
pub mod runtime;

pub use plain::{plain, plain_line};
