//! Checks on machines and clusters that are values.

mod cluster;
mod engine;
mod explain;
mod fires;
mod host;
mod machines;
mod report;
