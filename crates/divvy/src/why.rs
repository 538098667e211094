//! The text of `divvy why`. The crate `divvy-why` computes the answers; this module lays them out for a terminal.

mod names;
mod placement;
#[cfg(test)]
mod tests;
mod text;

pub use names::{WhyTarget, Workload};
pub use placement::{Placement, placement, placement_text};
pub use text::{AnswerStyle, text};
