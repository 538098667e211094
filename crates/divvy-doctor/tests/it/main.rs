//! Tests of the checks on machines and clusters that are built in memory.

#[expect(
    dead_code,
    reason = "the builders are divvy-container's own, and not all of them are used here"
)]
#[path = "../../../divvy-container/tests/it/machine.rs"]
mod machine;

mod cluster;
mod engine;
mod explain;
mod fires;
mod host;
mod machines;
mod report;
