//! Integration tests, one binary.
#![allow(clippy::unwrap_used)]

mod api;
mod cores;
mod node;
mod scheduler;
