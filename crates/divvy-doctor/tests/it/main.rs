//! Checks on machines and clusters that are values.

// The builders are divvy-container's own, and not all of them are used here.
#[allow(dead_code)]
#[path = "../../../divvy-container/tests/it/machine.rs"]
mod machine;

mod explain;
mod fires;
mod host;
mod machines;
mod report;
