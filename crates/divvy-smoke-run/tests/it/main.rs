//! Tests of the crate.

mod limits;
mod pods;
mod results;
mod targets;
mod world;
