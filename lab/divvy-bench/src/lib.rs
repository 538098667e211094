//! A cluster of any size as JSON, an API server that serves only this cluster, and the calls that kube-scheduler makes.
//!
//! This crate is used by `cargo xtask bench` and by the programs in `benches`. Nothing in it is part of a released program.

#![forbid(unsafe_code)]

pub mod api;
pub mod ask;
pub mod cluster;

/// Return the arguments of this program without `--bench`, which `cargo bench` adds.
pub fn arguments() -> impl Iterator<Item = String> {
    std::env::args().skip(1).filter(|argument| argument != "--bench")
}
