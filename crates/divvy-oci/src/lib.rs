//! What an OCI runtime and an OCI hook decide: text in, text out. No file is opened here.
//!
//! - [`runtime`]: the runtime that stands in front of runc or crun (`divvy-runtime`)
//! - [`hook`]: the hook that prepares a container's root file system (`divvy-hook`)

#![forbid(unsafe_code)]

pub mod hook;
pub mod runtime;
