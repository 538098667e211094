//! Plots and pages as text: SVG without scripts, fonts, or other external resources, readable on light and dark backgrounds.

mod bars;
mod lines;
mod page;
mod svg;

pub use bars::Bars;
pub use lines::Lines;
pub use page::Page;

/// The data to be drawn for one policy.
#[derive(Debug, Clone, PartialEq)]
pub struct Series<T> {
    /// The policy's name.
    pub name: String,
    /// The index of the color. A policy has the same color in all plots.
    pub colour: usize,
    /// The values.
    pub values: T,
}
