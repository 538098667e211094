//! The library as containers get it, in front of the guard and the simulated driver.
//!
//! The libraries under test are those that ship: only the paths in them are replaced, by others of the same length.

#![allow(clippy::unwrap_used, reason = "tests")]

mod binary;
mod loading;
mod sandbox;
mod untouched;
