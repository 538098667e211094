//! A cluster of any size as JSON, an API server that serves only this cluster, and the calls of kube-scheduler.
//!
//! Used by `cargo xtask bench` and by `divvy-extender`'s example `bench`. Nothing here is part of a released program.

#![forbid(unsafe_code)]

pub mod api;
pub mod ask;
pub mod cluster;
