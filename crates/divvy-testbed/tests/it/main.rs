//! Integration tests, one binary.
#![allow(clippy::unwrap_used)]

mod api;
mod cores;
mod fuzz;
mod node;
mod scheduler;
