//! Integration tests, one binary.
#![allow(clippy::unwrap_used)]

mod api;
mod fuzz;
mod node;
mod scheduler;
