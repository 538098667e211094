//! All CDI specs of a machine: which file provides which device, and the order in which edits are applied.
//!
//! The rules are those of the standard's own cache (`pkg/cdi/cache.go`), so the result is the same as in containerd, CRI-O, and podman.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error as ThisError;

use super::{Edits, ProblemSeverity, Spec, SpecError, SpecProblem};
use divvy_host::plain;

/// The directories in which readers look for specs, lowest priority first.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Report whether readers load a file of this name.
pub fn is_spec_file(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, ending)| matches!(ending, "json" | "yaml"))
}

/// A file in a directory of specs.
#[derive(Debug, Clone)]
pub struct FoundSpec {
    /// The file's path.
    pub path: String,
    /// The index of the file's directory in the list of directories. A higher index wins.
    pub priority: usize,
    /// The parsed spec, or the reason why the file cannot be read or parsed.
    pub spec: Result<Spec, SpecError>,
}

/// A device of a file.
#[derive(Debug, Clone)]
pub struct FoundDevice<'a> {
    /// The qualified name, `vendor/class=name`.
    pub name: String,
    /// The file that has the device.
    pub file: &'a FoundSpec,
    /// Other files of the same priority that have a device of this name. In this case readers inject none of them.
    pub conflicts_with: Vec<&'a str>,
    /// The file of a higher priority whose device of this name is used instead.
    pub hidden_by: Option<&'a str>,
}

/// The qualified names of requested devices that cannot be injected.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("unresolvable CDI devices {}", .0.join(", "))]
pub struct Unresolved(pub Vec<String>);

/// All specs of a machine, with an index by device name.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    files: Vec<FoundSpec>,
    /// For each qualified name, the indices of the files that have the device, in the order of reading.
    by_name: BTreeMap<String, Vec<usize>>,
}

impl Registry {
    /// Index files. They are sorted as readers load them: directories by ascending priority, and files by name.
    pub fn new(mut files: Vec<FoundSpec>) -> Registry {
        files.sort_by(|a, b| (a.priority, &a.path).cmp(&(b.priority, &b.path)));
        let mut by_name: BTreeMap<String, Vec<usize>> = BTreeMap::new();
        for (i, file) in files.iter().enumerate() {
            if let Some(spec) = file.usable() {
                for device in &spec.devices {
                    by_name.entry(format!("{}={}", spec.kind, device.name)).or_default().push(i);
                }
            }
        }
        Registry { files, by_name }
    }

    /// Return the files in the order of reading.
    pub fn files(&self) -> &[FoundSpec] {
        &self.files
    }

    /// Return every device of every valid file, sorted by name.
    pub fn devices(&self) -> Vec<FoundDevice<'_>> {
        let mut devices = Vec::new();
        for (name, at) in &self.by_name {
            let highest = at.iter().map(|i| self.files[*i].priority).max();
            let in_conflict = self.conflict(at);
            for i in at {
                let file = &self.files[*i];
                let others = at.iter().map(|other| &self.files[*other]);
                let conflicts_with = others
                    .clone()
                    .filter(|other| other.priority == file.priority && other.path != file.path);
                let hidden_by = others
                    .clone()
                    .find(|other| Some(other.priority) == highest && other.priority > file.priority);
                devices.push(FoundDevice {
                    name: name.clone(),
                    file,
                    conflicts_with: if in_conflict {
                        conflicts_with.map(|other| other.path.as_str()).collect()
                    } else {
                        Vec::new()
                    },
                    hidden_by: hidden_by.map(|other| other.path.as_str()),
                });
            }
        }
        devices
    }

    /// Report whether two files of one directory have the device. In this case no reader injects it, even if a directory of a higher priority has
    /// it as well. This is what the standard's own cache does.
    fn conflict(&self, at: &[usize]) -> bool {
        let mut priorities = BTreeSet::new();
        !at.iter().all(|i| priorities.insert(self.files[*i].priority))
    }

    /// Return the spec that provides a device; `None` if there is no such device or its files conflict.
    pub fn spec_of(&self, qualified: &str) -> Option<&Spec> {
        let at = self.by_name.get(qualified)?;
        if self.conflict(at) {
            None
        } else {
            // The files are sorted by ascending priority, so the last one wins.
            self.files[*at.last()?].usable()
        }
    }

    /// Return the edits for the requested devices, in the order of injection. A spec's common edits come once, before the edits
    /// of its first requested device.
    ///
    /// # Errors
    /// Returns the names of all devices that cannot be resolved. In this case no device is injected.
    pub fn edits<'a>(&'a self, devices: &[&str]) -> Result<Vec<&'a Edits>, Unresolved> {
        let mut edits = Vec::new();
        let mut unresolved = Vec::new();
        let mut begun: Vec<*const Spec> = Vec::new();
        for qualified in devices {
            let name = qualified.split_once('=').map_or("", |(_, name)| name);
            let device = self.spec_of(qualified).and_then(|spec| {
                let device = spec.devices.iter().find(|device| device.name == name)?;
                Some((spec, device))
            });
            let Some((spec, device)) = device else {
                unresolved.push((*qualified).to_owned());
                continue;
            };
            if !begun.iter().any(|other| std::ptr::eq(*other, spec)) {
                begun.push(spec);
                edits.push(&spec.container_edits);
            }
            edits.push(&device.container_edits);
        }
        if unresolved.is_empty() {
            Ok(edits)
        } else {
            Err(Unresolved(unresolved))
        }
    }
}

impl FoundSpec {
    /// Parse the text of a file, or keep the error if the file could not be read.
    pub fn of<E: std::fmt::Display>(path: impl Into<String>, priority: usize, text: Result<String, E>) -> FoundSpec {
        let text = text.map_err(|error| SpecError::NoText(error.to_string()));
        FoundSpec {
            path: path.into(),
            priority,
            spec: text.and_then(|text| Spec::parse(&text)),
        }
    }

    /// Return the problems of the file. A file that cannot be read or parsed has exactly one, an error.
    pub fn problems(&self) -> Vec<SpecProblem> {
        match &self.spec {
            Ok(spec) => spec.problems(),
            Err(error) => vec![SpecProblem {
                severity: ProblemSeverity::Error,
                field: "file".to_owned(),
                text: plain(&error.to_string()).into_owned(),
            }],
        }
    }

    /// Return the spec if it is valid, that is, if readers accept it.
    pub fn usable(&self) -> Option<&Spec> {
        self.spec.as_ref().ok().filter(|spec| spec.is_valid())
    }
}
