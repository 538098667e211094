//! Integration tests of the crate, in one binary.
#![allow(clippy::unwrap_used)]

mod fixed;
mod named;
