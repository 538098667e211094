//! Integration tests of the test bed, in one binary.
#![allow(clippy::unwrap_used)]

mod api;
mod node;
