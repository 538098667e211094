//! Running the programs of this machine.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

/// Run a command. If it fails, say what it printed last.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command.output().with_context(|| {
        format!("{name} could not be run; `cargo xtask compat --help` lists the packages that must be installed")
    })?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let words: Vec<_> = command.get_args().map(|word| word.to_string_lossy().into_owned()).collect();
    bail!(
        "{name} {} failed ({}); it printed last:\n{}",
        words.join(" "),
        output.status,
        lines[lines.len().saturating_sub(10)..].join("\n")
    )
}
