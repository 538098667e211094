//! Plots and pages as text: SVG without scripts, fonts or anything else from elsewhere, readable on light and on dark ground.

mod bars;
mod lines;
mod page;
mod svg;

pub use bars::Bars;
pub use lines::Lines;
pub use page::Page;

/// What is drawn of one policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Series<T> {
    /// Its name.
    pub name: String,
    /// Which of the colours; a policy has the same in all plots.
    pub colour: usize,
    /// What is drawn.
    pub values: T,
}
