//! Tests of the checks on machines and clusters that are built in memory.

mod cluster;
mod control_plane;
mod engine;
mod explain;
mod fires;
mod host;
mod machines;
mod report;
