//! The simulator on traces, from outside.

mod bad_input;
mod completions;
mod openb;
mod properties;
mod what_if;

#[path = "../../examples/variants/lists.rs"]
mod lists;
