//! Generates docs/reference and the man pages from the programs themselves.
//!
//! - [`annotations`]: from the doc comments in `divvy_model::names`
//! - [`cli`]: from the grammar in `divvy::cli`
//! - [`metrics`]: from a scrape of each daemon's metrics

#![forbid(unsafe_code)]

pub mod annotations;
pub mod cli;
pub mod metrics;

use anyhow::Result;

/// Return the files of docs/reference: their paths in the repository, and their texts.
///
/// # Errors
/// `divvy_model::names` has a name whose doc comment does not say what kind of name it is, or a metric cannot be formatted.
pub fn documents() -> Result<[(&'static str, String); 3]> {
    Ok([
        ("docs/reference/annotations.md", annotations::markdown()?),
        ("docs/reference/cli.md", cli::markdown()),
        ("docs/reference/metrics.md", metrics::markdown()?),
    ])
}

/// Return the text of a table's cell, in which no `|` ends the cell.
fn cell(text: &str) -> String {
    text.replace('|', "\\|")
}
