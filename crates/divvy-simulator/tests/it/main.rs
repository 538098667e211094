//! Tests of the simulator through its public interface.

mod bad_input;
mod completions;
mod openb;
mod properties;
mod what_if;

#[path = "../../examples/pod_lists/lists.rs"]
mod lists;
