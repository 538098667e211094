//! All CDI specs of a machine: which device comes from which file, and the order in which edits are applied.
//!
//! As the standard's own cache does it, so that what is said here of a machine is what containerd, CRI-O and podman do.

use std::collections::{BTreeMap, BTreeSet};

use thiserror::Error as ThisError;

use super::{Edits, Problem, Severity, Spec};
use divvy_host::plain;

/// Where readers look, lowest priority first.
pub const DIRECTORIES: [&str; 2] = ["/etc/cdi", "/var/run/cdi"];

/// Whether readers look into a file of this name.
pub fn is_spec_file(name: &str) -> bool {
    name.rsplit_once('.')
        .is_some_and(|(_, ending)| matches!(ending, "json" | "yaml"))
}

/// A file that was found in a directory of specs.
#[derive(Debug, Clone)]
pub struct Found {
    /// Where.
    pub path: String,
    /// Position of the directory in the list of directories: a higher one wins.
    pub priority: usize,
    /// What is in it, or why it could not be read.
    pub spec: Result<Spec, String>,
}

/// One device of one file.
#[derive(Debug, Clone)]
pub struct FoundDevice<'a> {
    /// `vendor/class=name`.
    pub name: String,
    /// The file.
    pub file: &'a Found,
    /// Other files of the same priority that have it: then readers give out neither.
    pub conflicts_with: Vec<&'a str>,
    /// The file of a higher priority that is taken instead.
    pub hidden_by: Option<&'a str>,
}

/// Devices that cannot be injected.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
#[error("unresolvable CDI devices {}", .0.join(", "))]
pub struct Unresolved(pub Vec<String>);

/// The specs of a machine.
#[derive(Debug, Clone, Default)]
pub struct Registry {
    files: Vec<Found>,
    /// By qualified name: the files that have it, in the order of reading.
    by_name: BTreeMap<String, Vec<usize>>,
}

impl Registry {
    /// Takes files in; readers go through directories by rising priority, and through files by name.
    pub fn new(mut files: Vec<Found>) -> Registry {
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

    /// The files, in the order of reading.
    pub fn files(&self) -> &[Found] {
        &self.files
    }

    /// Every device of every usable file, by name.
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
                    conflicts_with: match in_conflict {
                        true => conflicts_with.map(|other| other.path.as_str()).collect(),
                        false => Vec::new(),
                    },
                    hidden_by: hidden_by.map(|other| other.path.as_str()),
                });
            }
        }
        devices
    }

    /// Whether two files of one directory have the device. Then nobody gives it, not even a directory of a higher priority: so does
    /// the standard's own cache.
    fn conflict(&self, at: &[usize]) -> bool {
        let mut priorities = BTreeSet::new();
        !at.iter().all(|i| priorities.insert(self.files[*i].priority))
    }

    /// The spec that a device comes from.
    pub fn spec_of(&self, qualified: &str) -> Option<&Spec> {
        let at = self.by_name.get(qualified)?;
        match self.conflict(at) {
            true => None,
            // Rising priorities: the last one wins.
            false => self.files[*at.last()?].usable(),
        }
    }

    /// The edits for these devices in the order of injection: those of a spec before the first of its devices, once, then each
    /// device's own.
    ///
    /// # Errors
    /// Names all devices that cannot be had; then none is injected.
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
        match unresolved.is_empty() {
            true => Ok(edits),
            false => Err(Unresolved(unresolved)),
        }
    }
}

impl Found {
    /// A file with this text, or that could not be read.
    pub fn of<E: std::fmt::Display>(path: impl Into<String>, priority: usize, text: Result<String, E>) -> Found {
        let text = text.map_err(|error| error.to_string());
        Found {
            path: path.into(),
            priority,
            spec: text.and_then(|text| Spec::parse(&text).map_err(|error| error.to_string())),
        }
    }

    /// What is wrong with the file; one that cannot be read has one error.
    pub fn problems(&self) -> Vec<Problem> {
        match &self.spec {
            Ok(spec) => spec.problems(),
            Err(text) => vec![Problem {
                severity: Severity::Error,
                field: "file".to_owned(),
                text: plain(text).into_owned(),
            }],
        }
    }

    /// The spec, if readers take it.
    pub fn usable(&self) -> Option<&Spec> {
        self.spec.as_ref().ok().filter(|spec| spec.is_valid())
    }
}
