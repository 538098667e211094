//! Everything that prepares a container for a GPU: CDI specs, container engines' configuration, the OCI runtime's edits, and the hook.
//!
//! This crate only turns text into text. It opens no files: callers decide where a text comes from and where the result goes.

#![forbid(unsafe_code)]

pub mod cdi;
pub mod engines;
pub mod hook;
mod plain;
pub mod runtime;

pub use plain::{plain, plain_line};
