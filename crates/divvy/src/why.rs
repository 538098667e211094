//! The text of `divvy why`. What it says comes from `divvy-why`, which knows nothing of terminals.

mod names;
mod placement;
#[cfg(test)]
mod tests;
mod text;

pub use names::{Name, Workload};
pub use placement::{Placement, placement, placement_text};
pub use text::{Style, text};
