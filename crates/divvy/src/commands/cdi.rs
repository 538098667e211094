//! `divvy cdi`.

mod generate;
mod list;
mod transform;
mod validate;

use std::path::Path;

use divvy_container::cdi::{Found, Problem, Registry, Severity, is_spec_file};
use divvy_hardware::Files;

use super::{read_bounded, say, write_whole};
use crate::cli::cdi::CdiCommand;

/// Specs may name hundreds of libraries.
const LARGEST_SPEC: u64 = 4 * 1024 * 1024;

/// Makes, lists or checks specs. `Ok(false)`: something is wrong with those that are there.
pub async fn run(command: CdiCommand) -> anyhow::Result<bool> {
    match command {
        CdiCommand::Generate(args) => generate::run(*args).await.map(|()| true),
        CdiCommand::List(args) => list::run(&args),
        CdiCommand::Validate(args) => validate::run(&args),
        CdiCommand::Transform(args) => transform::run(&args).map(|()| true),
    }
}

/// The files of a directory: those that readers look into, and the names of those that were meant so and are not.
fn directory(path: &Path, shown: &str, priority: usize) -> std::io::Result<(Vec<Found>, Vec<String>)> {
    let (mut found, mut ignored) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(path)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let shown = format!("{}/{name}", shown.trim_end_matches('/'));
        // Links are followed, as readers do.
        if std::fs::metadata(entry.path()).is_ok_and(|metadata| metadata.is_dir()) {
            continue;
        }
        if is_spec_file(&name) {
            found.push(Found::of(shown, priority, read_bounded(&entry.path(), LARGEST_SPEC)));
        } else if name
            .rsplit_once('.')
            .is_some_and(|(_, ending)| ["yml", "YAML", "YML", "JSON"].contains(&ending))
        {
            ignored.push(shown);
        }
    }
    Ok((found, ignored))
}

/// What to say of a file in which readers do not look.
fn ignored(path: &str) -> Problem {
    Problem {
        severity: Severity::Warning,
        field: "file".to_owned(),
        text: format!("{path} is not read by any engine: its name must end in .yaml or .json; rename it"),
    }
}

/// What to say of a device that two files have.
fn conflict(device: &str, file: &str, others: &[&str]) -> Problem {
    Problem {
        severity: Severity::Error,
        field: "devices".to_owned(),
        text: format!(
            "conflicting device {device:?} (specs {file:?}, {}): engines give out neither; remove one of the files",
            others.iter().map(|other| format!("{other:?}")).collect::<Vec<_>>().join(", ")
        ),
    }
}

/// Troubles of looking at a machine.
fn tell_troubles(files: &Files) -> std::io::Result<()> {
    files
        .troubles()
        .iter()
        .try_for_each(|trouble| say(&format!("warning: not looked at: {trouble}")))
}

/// All conflicts of a registry, by file.
fn conflicts(registry: &Registry) -> Vec<(String, Problem)> {
    let devices = registry.devices();
    let in_conflict = devices.iter().filter(|device| !device.conflicts_with.is_empty());
    in_conflict
        .map(|device| {
            let path = &device.file.path;
            (path.clone(), conflict(&device.name, path, &device.conflicts_with))
        })
        .collect()
}
