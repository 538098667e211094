//! `divvy cdi`: runs its subcommands, and reads directories of specs for them.

mod generate;
mod list;
mod transform;
mod validate;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use divvy_cdi::{FoundSpec, ProblemSeverity, Registry, SpecProblem, is_spec_file};
use divvy_host::Files;
use divvy_host::Root;

use super::{bounded, read_bounded, say, write_whole};
use crate::cli::cdi::CdiCommand;

/// The largest accepted spec in bytes; a spec may name hundreds of libraries.
const LARGEST_SPEC: u64 = 4 * 1024 * 1024;

/// Run a subcommand of `divvy cdi`. Return `Ok(false)` if the existing specs have problems.
pub async fn run(command: CdiCommand) -> anyhow::Result<bool> {
    match command {
        CdiCommand::Generate(args) => generate::run(*args).await.map(|()| true),
        CdiCommand::List(args) => list::run(&args),
        CdiCommand::Validate(args) => validate::run(&args),
        CdiCommand::Transform(args) => transform::run(&args).map(|()| true),
    }
}

/// Return the spec files of a directory, and the names of files that look like specs but that engines do not read.
fn read_directory(path: &Path, shown: &str, priority: usize) -> std::io::Result<(Vec<FoundSpec>, Vec<String>)> {
    // Symbolic links are followed, as engines do.
    listed(path, shown, priority, |name| Some(path.join(name)))
}

/// Do the same as [`read_directory`] for a directory of the machine whose root is `sys_root`. Symbolic links are resolved below
/// that root.
fn read_directory_below(sys_root: &Path, directory: &str, priority: usize) -> std::io::Result<(Vec<FoundSpec>, Vec<String>)> {
    if sys_root == Path::new("/") {
        return read_directory(Path::new(directory), directory, priority);
    }
    let files = Files::below(sys_root);
    let not_found = || std::io::Error::from(std::io::ErrorKind::NotFound);
    let root = Root::open(&files, "/").ok_or_else(not_found)?;
    let here = |path: &str| {
        let (real, _) = root.resolve(path)?;
        Some(sys_root.join(real.trim_start_matches('/')))
    };
    let real = here(directory).ok_or_else(not_found)?;
    listed(&real, directory, priority, |name| here(&format!("{directory}/{name}")))
}

/// Read the specs of the directory `path`, whose name on the machine is `shown`. `real` maps a file name to the path to open.
fn listed(
    path: &Path,
    shown: &str,
    priority: usize,
    real: impl Fn(&str) -> Option<PathBuf>,
) -> std::io::Result<(Vec<FoundSpec>, Vec<String>)> {
    let (mut found, mut ignored) = (Vec::new(), Vec::new());
    for entry in std::fs::read_dir(path)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        let shown = format!("{}/{name}", shown.trim_end_matches('/'));
        let real = real(&name).ok_or_else(|| std::io::Error::other("it is a link that leads nowhere"));
        let kind = real.and_then(|real| Ok((std::fs::metadata(&real)?, real)));
        if kind.as_ref().is_ok_and(|(metadata, _)| metadata.is_dir()) {
            continue;
        }
        if is_spec_file(&name) {
            let text = kind.and_then(|(metadata, real)| {
                if metadata.is_file() {
                    read_bounded(&real, LARGEST_SPEC)
                } else {
                    Err(std::io::Error::other("it is a device, a socket or a pipe"))
                }
            });
            found.push(FoundSpec::of(shown, priority, text));
        } else if name
            .rsplit_once('.')
            .is_some_and(|(_, ending)| ["yml", "YAML", "YML", "JSON"].contains(&ending))
        {
            ignored.push(shown);
        }
    }
    Ok((found, ignored))
}

/// Read a spec from standard input.
fn standard_input() -> anyhow::Result<String> {
    bounded(std::io::stdin(), LARGEST_SPEC).context("standard input cannot be read")
}

/// Return the warning about a file that looks like a spec, but that engines do not read.
fn ignored(path: &str) -> SpecProblem {
    SpecProblem {
        severity: ProblemSeverity::Warning,
        field: "file".to_owned(),
        text: format!("engines do not read {path}, because its name does not end in .yaml or .json; rename it"),
    }
}

/// Return the error about a device that several files of one directory define.
fn conflict(device: &str, file: &str, others: &[&str]) -> SpecProblem {
    SpecProblem {
        severity: ProblemSeverity::Error,
        field: "devices".to_owned(),
        text: format!(
            "conflicting device {device:?} (specs {file:?}, {}): engines use none of them; remove all files but one",
            others.iter().map(|other| format!("{other:?}")).collect::<Vec<_>>().join(", ")
        ),
    }
}

/// Print the problems that occurred while reading the machine's files.
fn warn_about_files(files: &Files) -> std::io::Result<()> {
    files
        .troubles()
        .iter()
        .try_for_each(|trouble| say(&format!("warning: not checked: {trouble}")))
}

/// Return all conflicts of a registry, each with the path of its file.
fn conflicts(registry: &Registry) -> Vec<(String, SpecProblem)> {
    let devices = registry.devices();
    let in_conflict = devices.iter().filter(|device| !device.conflicts_with.is_empty());
    in_conflict
        .map(|device| {
            let path = &device.file.path;
            (path.clone(), conflict(&device.name, path, &device.conflicts_with))
        })
        .collect()
}
