//! Findings: inputs that break a rule, kept so that they can be read again.

use std::path::{Path, PathBuf};

/// Write an input to a separate file. Return its path.
pub(crate) fn keep(target: &str, input: &[u8]) -> PathBuf {
    let word = target.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let path = std::env::temp_dir().join(format!("divvy-fuzz-{word}-{}", std::process::id()));
    match std::fs::write(&path, input) {
        Ok(()) => path,
        // If the file cannot be written, the seed still produces the input again.
        Err(error) => format!("{} (which could not be written: {error})", path.display()).into(),
    }
}

/// Return the rule that an input broke, and the command that shows it again.
pub(crate) fn report(target: &str, seed: u64, input: &Path, why: &str) -> String {
    let name = target.replace('\'', "'\\''");
    format!(
        "{target}: {} breaks a rule (seed {seed}): {why}\n  replay it: cargo run -p divvy-fuzz -- --only '{name}' --replay {}",
        input.display(),
        input.display()
    )
}
