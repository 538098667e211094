//! The library and the guard as containers get them, over the simulated drivers.

#![allow(clippy::unwrap_used, reason = "tests")]

mod binary;
mod files;
mod loading;
mod memory;
mod names;
mod processes;
mod sandbox;
