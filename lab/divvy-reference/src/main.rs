//! `divvy-reference DIRECTORY`: write docs/reference/cli.md of the repository, and the man pages into DIRECTORY.

use std::path::Path;

use anyhow::{Context as _, Result};

fn main() -> Result<()> {
    let directory = std::env::args_os().nth(1).context("usage: divvy-reference DIRECTORY")?;
    let file = Path::new("docs/reference/cli.md");
    std::fs::write(file, divvy_reference::markdown()).with_context(|| format!("{} cannot be written", file.display()))?;
    divvy_reference::man_pages(Path::new(&directory)).context("the man pages cannot be written")
}
