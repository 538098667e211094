//! The simulator on traces, from outside.

mod bad_input;
mod openb;
