//! Integration tests of the torture, in one binary.
#![allow(clippy::unwrap_used)]

mod fixed;
mod named;
