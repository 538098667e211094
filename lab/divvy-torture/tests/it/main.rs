//! Integration tests, one binary.
#![allow(clippy::unwrap_used)]

mod fixed;
mod named;
