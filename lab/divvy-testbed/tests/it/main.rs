//! Integration tests, one binary.
#![allow(clippy::unwrap_used)]

mod api;
mod node;
mod scheduler;
