//! What `divvy top` shows on a terminal.
//!
//! [`TopState`] is all that the screen depends on. [`TopState::update`] takes an [`TopEvent`] and returns the next state, and [`draw`] draws a state. Nothing here
//! reads a terminal, a clock, or a cluster: the program does that, and turns what it finds into events.

#![forbid(unsafe_code)]

mod bar;
mod draw;
mod row;
mod rows;
mod seen;
mod state;
mod waiting;

pub use draw::{ScreenStyle, draw, lines};
pub use state::{KeyPress, TopEvent, TopState};
