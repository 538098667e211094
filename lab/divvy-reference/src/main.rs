//! `divvy-reference DIRECTORY`: write docs/reference of the repository in the current directory, and the man pages into DIRECTORY.

use std::path::Path;

use anyhow::{Context as _, Result};

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("usage: divvy-reference DIRECTORY")?;
    for (file, text) in divvy_reference::documents()? {
        std::fs::write(file, text).with_context(|| format!("{file} cannot be written"))?;
    }
    divvy_reference::cli::man_pages(Path::new(&directory)).context("the man pages cannot be written")
}
