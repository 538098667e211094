//! `divvy cdi validate`: checks spec files, and prints the findings.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::Context as _;
use divvy_cdi::stale::Stale;
use divvy_cdi::{CdiVersion, FoundSpec, ProblemSeverity, Registry, SpecProblem};
use divvy_host::Files;
use serde::Serialize;

use super::{LARGEST_SPEC, conflicts, ignored, read_bounded, read_directory, say, standard_input, warn_about_files};
use crate::cli::cdi::{CdiValidateArgs, CdiValidateOutput};
use crate::printer;

/// The result for one file.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FileVerdict {
    file: String,
    valid: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    cdi_version: Option<String>,
    /// The oldest CDI version that has all features that the file uses.
    #[serde(skip_serializing_if = "Option::is_none")]
    least_version: Option<String>,
    devices: usize,
    errors: Vec<SpecFinding>,
    warnings: Vec<SpecFinding>,
}

#[derive(Debug, Serialize)]
struct SpecFinding {
    field: String,
    text: String,
}

/// Check the files, and print the findings. Return `Ok(false)` if there are errors, or, with `--strict`, warnings.
pub(super) fn run(args: &CdiValidateArgs) -> anyhow::Result<bool> {
    let machine = Files::below(&args.sys_root);
    let mut verdicts = Vec::new();
    // Engines look for conflicts within one directory, so group the files by directory.
    let mut directories: BTreeMap<String, Vec<FoundSpec>> = BTreeMap::new();
    for path in &args.files {
        let shown = path.display().to_string();
        if path == Path::new("-") {
            let text = Ok::<_, std::convert::Infallible>(standard_input()?);
            directories.entry(shown).or_default().push(FoundSpec::of("-", 0, text));
        } else if std::fs::metadata(path)
            .with_context(|| format!("{shown} cannot be read"))?
            .is_dir()
        {
            let (found, not_read) =
                read_directory(path, &shown, 0).with_context(|| format!("the directory {shown} cannot be read"))?;
            if found.is_empty() && not_read.is_empty() {
                say(&format!("warning: {shown} has no file whose name ends in .yaml or .json"))?;
            }
            directories.entry(shown).or_default().extend(found);
            verdicts.extend(not_read.iter().map(|path| verdict_of_ignored(path)));
        } else {
            let directory = path
                .parent()
                .map_or_else(String::new, |directory| directory.display().to_string());
            directories
                .entry(directory)
                .or_default()
                .push(FoundSpec::of(shown, 0, read_bounded(path, LARGEST_SPEC)));
        }
    }
    for found in directories.into_values() {
        let registry = Registry::new(found);
        let conflicts = conflicts(&registry);
        verdicts.extend(registry.files().iter().map(|file| verdict(file, &conflicts, &machine)));
    }
    warn_about_files(&machine)?;
    verdicts.sort_by(|a, b| a.file.cmp(&b.file));
    match args.output {
        CdiValidateOutput::Json => printer::json(&verdicts)?,
        CdiValidateOutput::Text => printer::print(&verdicts.iter().map(text).collect::<String>())?,
    }
    Ok(verdicts
        .iter()
        .all(|verdict| verdict.valid && (verdict.warnings.is_empty() || !args.strict)))
}

fn verdict(file: &FoundSpec, conflicts: &[(String, SpecProblem)], machine: &Files) -> FileVerdict {
    let mut problems = file.problems();
    problems.extend(
        conflicts
            .iter()
            .filter(|(path, _)| *path == file.path)
            .map(|(_, problem)| problem.clone()),
    );
    if let Some(spec) = file.usable() {
        problems.extend(Stale::check(spec, machine).sentences().into_iter().map(|text| SpecProblem {
            severity: ProblemSeverity::Warning,
            field: "file".to_owned(),
            text: format!("it is stale: {text}; generate it again"),
        }));
    }
    let spec = file.spec.as_ref().ok();
    FileVerdict {
        file: file.path.clone(),
        valid: problems.iter().all(|problem| problem.severity != ProblemSeverity::Error),
        cdi_version: spec.map(|spec| spec.cdi_version.clone()),
        least_version: spec.map(|spec| CdiVersion::least_for(spec).to_string()),
        devices: spec.map_or(0, |spec| spec.devices.len()),
        errors: of(&problems, ProblemSeverity::Error),
        warnings: of(&problems, ProblemSeverity::Warning),
    }
}

fn verdict_of_ignored(path: &str) -> FileVerdict {
    FileVerdict {
        file: path.to_owned(),
        valid: true,
        cdi_version: None,
        least_version: None,
        devices: 0,
        errors: Vec::new(),
        warnings: of(&[ignored(path)], ProblemSeverity::Warning),
    }
}

fn of(problems: &[SpecProblem], severity: ProblemSeverity) -> Vec<SpecFinding> {
    let problems = problems.iter().filter(|problem| problem.severity == severity);
    problems
        .map(|problem| SpecFinding {
            field: problem.field.clone(),
            text: problem.text.clone(),
        })
        .collect()
}

fn text(verdict: &FileVerdict) -> String {
    let file = &verdict.file;
    let line = |kind: &str, finding: &SpecFinding| format!("{file}: {kind}: {}: {}\n", finding.field, finding.text);
    let mut text: String = verdict.errors.iter().map(|finding| line("error", finding)).collect();
    text.extend(verdict.warnings.iter().map(|finding| line("warning", finding)));
    if let (true, Some(version), Some(least)) = (verdict.valid, &verdict.cdi_version, &verdict.least_version) {
        let needs = if least == version {
            String::new()
        } else {
            format!(", needs {least}")
        };
        text.push_str(&format!("{file}: valid, CDI {version}{needs}, {} devices\n", verdict.devices));
    }
    text
}
