//! The guard as containers get it, over the simulated driver.
//!
//! The library under test is the one that ships: only the two paths in it are replaced, by others of the same length.

#![allow(clippy::unwrap_used, reason = "tests")]

mod account;
mod arrays;
mod binary;
#[cfg(target_arch = "x86_64")]
mod cost;
mod files;
mod graphs;
mod launches;
mod loading;
mod mappings;
mod names;
mod pools;
mod programs;
mod sandbox;
mod several;
mod shared;
#[cfg(target_arch = "x86_64")]
mod steps;
mod view;
