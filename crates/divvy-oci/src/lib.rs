//! The decisions of an OCI runtime and of an OCI hook. The functions take texts and return texts; no file is opened here.
//!
//! - [`runtime`]: the runtime that stands in front of runc or crun (`divvy-runtime`)
//! - [`hook`]: the hook that prepares a container's root file system (`divvy-hook`)

#![forbid(unsafe_code)]

pub mod hook;
pub mod runtime;
