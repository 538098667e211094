//! `divvy cdi list`: lists the devices of the machine's specs, with their states.

use std::collections::BTreeMap;

use anyhow::Context as _;
use divvy_cdi::stale::Stale;
use divvy_cdi::{FoundDevice, ProblemSeverity, Registry};
use divvy_host::Files;
use serde::Serialize;

use super::{conflicts, ignored, read_directory_below, say, warn_about_files};
use crate::cli::cdi::{CdiListArgs, CdiListOutput};
use crate::printer;

/// The output of `divvy cdi list -o json`.
#[derive(Debug, Serialize)]
struct CdiListing {
    devices: Vec<CdiDeviceRow>,
    files: Vec<ListedFile>,
}

#[derive(Debug, Serialize)]
struct CdiDeviceRow {
    name: String,
    file: String,
    /// `ok`, `conflict`, `hidden` or `stale`.
    state: &'static str,
    /// The other files of the same directory that define the device.
    #[serde(rename = "conflictsWith", skip_serializing_if = "Vec::is_empty")]
    conflicts_with: Vec<String>,
    /// The file in a directory of higher priority that also defines the device.
    #[serde(rename = "hiddenBy", skip_serializing_if = "Option::is_none")]
    hidden_by: Option<String>,
    /// The reasons for the state, as sentences.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    why: Vec<String>,
}

#[derive(Debug, Serialize)]
struct ListedFile {
    path: String,
    /// Whether engines accept the file.
    usable: bool,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    problems: Vec<String>,
}

/// Print the list. Return `Ok(false)` if `--strict` is set and there are problems.
pub(super) fn run(args: &CdiListArgs) -> anyhow::Result<bool> {
    let (mut found, mut not_read) = (Vec::new(), Vec::new());
    for (priority, shown) in args.spec_dir.iter().enumerate() {
        match read_directory_below(&args.sys_root, shown, priority) {
            Ok((files, names)) => {
                found.extend(files);
                not_read.extend(names);
            }
            // Engines also ignore a missing directory.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            Err(error) => return Err(error).with_context(|| format!("the directory {shown} cannot be read")),
        }
    }
    let registry = Registry::new(found);
    let machine = Files::below(&args.sys_root);
    let stale: BTreeMap<&str, Vec<String>> = registry
        .files()
        .iter()
        .filter_map(|file| Some((file.path.as_str(), Stale::check(file.usable()?, &machine).sentences())))
        .collect();
    warn_about_files(&machine)?;
    let devices: Vec<CdiDeviceRow> = registry.devices().iter().map(|device| row(device, &stale)).collect();
    let mut sound = devices.iter().all(|row| matches!(row.state, "ok" | "hidden"));
    let mut files = Vec::new();
    for file in registry.files() {
        let problems = file.problems();
        for problem in problems.iter().filter(|problem| problem.severity == ProblemSeverity::Error) {
            sound = false;
            say(&format!("warning: engines refuse {}: {problem}", file.path))?;
        }
        files.push(ListedFile {
            path: file.path.clone(),
            usable: file.usable().is_some(),
            problems: problems.iter().map(ToString::to_string).collect(),
        });
    }
    for path in &not_read {
        say(&format!("warning: {}", ignored(path).text))?;
    }
    for (_, problem) in conflicts(&registry) {
        say(&format!("warning: {}", problem.text))?;
    }
    match args.output {
        CdiListOutput::Json => printer::json(&CdiListing { devices, files })?,
        CdiListOutput::Name => {
            for row in devices.iter().filter(|row| matches!(row.state, "ok" | "stale")) {
                printer::line(&row.name)?;
            }
        }
        CdiListOutput::Table if devices.is_empty() => {
            say(&format!(
                "note: no CDI devices in {}; divvy cdi generate -o /var/run/cdi/nvidia.yaml describes the GPUs of this machine",
                args.spec_dir.join(", ")
            ))?;
        }
        CdiListOutput::Table => printer::print(&table(&devices))?,
    }
    Ok(sound || !args.strict)
}

fn row(device: &FoundDevice<'_>, stale: &BTreeMap<&str, Vec<String>>) -> CdiDeviceRow {
    let file = device.file.path.as_str();
    let stale = stale.get(file).map_or(&[][..], Vec::as_slice);
    let (state, why) = match device {
        FoundDevice { conflicts_with, .. } if !conflicts_with.is_empty() => (
            "conflict",
            conflicts_with
                .iter()
                .map(|other| format!("{other} also defines it"))
                .collect(),
        ),
        FoundDevice {
            hidden_by: Some(other), ..
        } => ("hidden", vec![format!("{other} takes precedence")]),
        _ if !stale.is_empty() => ("stale", stale.to_vec()),
        _ => ("ok", Vec::new()),
    };
    CdiDeviceRow {
        name: device.name.clone(),
        file: file.to_owned(),
        state,
        conflicts_with: device.conflicts_with.iter().map(|file| (*file).to_owned()).collect(),
        hidden_by: device.hidden_by.map(str::to_owned),
        why,
    }
}

fn table(rows: &[CdiDeviceRow]) -> String {
    let mut cells = "DEVICE\tSTATE\tFILE\tWHY\n".to_owned();
    for row in rows {
        cells.push_str(&format!(
            "{}\t{}\t{}\t{}\n",
            row.name,
            row.state,
            row.file,
            row.why.join("; ")
        ));
    }
    let text = printer::columns(&cells);
    text.lines().map(|line| format!("{}\n", line.trim_end())).collect()
}
