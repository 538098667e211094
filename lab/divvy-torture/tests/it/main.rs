//! Integration tests of the crate, in one binary.
#![allow(clippy::unwrap_used)]

mod bounds;
mod fixed;
mod named;
