//! The names of pods, from the agent's records of grants.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use divvy_model::GrantRecord;
use divvy_model::limits::ALLOCATION_BYTES;

use crate::commands::read_bounded;

/// The maximum number of records to read. A node has at most a few hundred pods.
const MOST_RECORDS: usize = 4096;

/// A pod of which the agent has records.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct GrantedPod {
    pub(super) namespace: String,
    pub(super) name: String,
    /// The containers that have a share, in the order of their names.
    pub(super) containers: Vec<String>,
}

/// Return the pods by UID, and what could not be read, as sentences.
pub(super) fn read(state_dir: &Path) -> (BTreeMap<String, GrantedPod>, Vec<String>) {
    let (records, troubles) = records(state_dir);
    let mut pods: BTreeMap<String, GrantedPod> = BTreeMap::new();
    for record in records {
        let pod = pods.entry(record.uid).or_insert_with(|| GrantedPod {
            namespace: record.namespace,
            name: record.name,
            containers: Vec::new(),
        });
        pod.containers.push(record.container);
    }
    (pods, troubles)
}

/// Return the agent's records in the order of their files' names, and what could not be read, as sentences.
pub(in crate::commands) fn records(state_dir: &Path) -> (Vec<GrantRecord>, Vec<String>) {
    let directory = state_dir.join("grants");
    let unread = |error: std::io::Error| {
        let directory = directory.display();
        format!(
            "the agent's records in {directory} cannot be read, so pods are shown by UID: {error}; run the command as root, and give the agent's directory with --state-dir"
        )
    };
    let mut names: Vec<_> = match fs::read_dir(&directory) {
        Ok(entries) => entries.flatten().map(|entry| entry.file_name()).collect(),
        Err(error) => return (Vec::new(), vec![unread(error)]),
    };
    names.retain(|name| Path::new(name).extension().is_some_and(|ending| ending == "json"));
    names.sort();
    let mut troubles = Vec::new();
    if names.len() > MOST_RECORDS {
        troubles.push(format!(
            "{} has {} records, of which only {MOST_RECORDS} were read",
            directory.display(),
            names.len()
        ));
        names.truncate(MOST_RECORDS);
    }
    let mut records = Vec::new();
    for name in names {
        let path = directory.join(&name);
        let text = match read_bounded(&path, ALLOCATION_BYTES as u64) {
            Ok(text) => text,
            // The agent removed it meanwhile.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => {
                troubles.push(format!("{} is ignored: {error}", path.display()));
                continue;
            }
        };
        match GrantRecord::parse(&text) {
            Ok(record) if name == *record.file_name() => records.push(record),
            Ok(record) => troubles.push(format!(
                "{} is ignored: it is the record {}",
                path.display(),
                record.file_name()
            )),
            Err(error) => troubles.push(format!("{} is ignored: {error}", path.display())),
        }
    }
    (records, troubles)
}
