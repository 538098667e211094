//! What was found: an input that breaks a rule, kept so that it can be read again.

use std::path::{Path, PathBuf};

/// Writes an input to a file of its own.
pub(crate) fn keep(target: &str, input: &[u8]) -> PathBuf {
    let word = target.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let path = std::env::temp_dir().join(format!("divvy-fuzz-{word}-{}", std::process::id()));
    match std::fs::write(&path, input) {
        Ok(()) => path,
        // The seed makes it again.
        Err(error) => format!("{} (which could not be written: {error})", path.display()).into(),
    }
}

/// The rule that an input broke, and how to see it again.
pub(crate) fn report(target: &str, seed: u64, input: &Path, why: &str) -> String {
    let name = target.replace('\'', "'\\''");
    format!(
        "{target}: {} breaks a rule (seed {seed}): {why}\n  replay it: cargo run -p divvy-fuzz -- --only '{name}' --replay {}",
        input.display(),
        input.display()
    )
}
