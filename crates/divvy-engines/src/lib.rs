//! Reads the configuration of container engines, and computes the edits that register one more OCI runtime: Docker's
//! `daemon.json`, containerd's `config.toml` with its imports, CRI-O's drop-ins. This crate only computes new texts from existing
//! texts.
//!
//! - [`docker`], [`containerd`], [`crio`]: one `read` for each engine, which merges its files exactly as the engine does
//! - [`Configuration`]: the merged configuration, in one form for all three engines
//! - [`configure`]: turns a [`RuntimeSettings`] into a [`EditPlan`]: the files that change, and a [`OriginalTexts`] of their original text
//! - [`undo`]: computes the edits that restore the original text
//! - [`Engine`]: where each distribution keeps its engine's files
//! - [`TextFiles`]: the source of the texts: a map, or a machine's files below a [`Root`]

#![forbid(unsafe_code)]

pub mod containerd;
mod copied_from;
pub mod crio;
pub mod docker;
mod edit;
mod glob;
mod json;
mod places;
mod plan;
mod revert;
mod target;
mod template;
mod text;
mod toml_text;

pub use edit::{Recorded, RuntimeSettings};
pub use places::{Engine, WantedFiles, runtime_class};
pub use plan::{Edit, EditPlan, OriginalTexts, configure, in_effect, undo};
pub use target::EngineTarget;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use divvy_host::{FileKind, Root};

/// The largest configuration file that is read, in bytes. Engine configuration is written by hand, so anything larger is a mistake.
pub const LARGEST: usize = 4 * 1024 * 1024;

/// Why an existing path has no readable text, as the end of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoText {
    /// It is a directory.
    #[error("it is a directory")]
    Directory,
    /// It is no file at all.
    #[error("it is a device, a socket or a pipe")]
    Special,
    /// The system does not open it.
    #[error("it could not be opened")]
    Unopened,
    /// It has more than [`LARGEST`] bytes.
    #[error("it is larger than {LARGEST} bytes")]
    TooLarge,
    /// It has bytes that are no text.
    #[error("it is not UTF-8 text")]
    NotUtf8,
}

/// The text files of a machine. Paths are absolute.
pub trait TextFiles {
    /// Return the text of a file, or `None` if the file does not exist.
    fn text(&self, path: &str) -> Result<Option<String>, NoText>;
    /// Return the names in a directory, sorted; empty if the directory does not exist.
    fn names(&self, directory: &str) -> Vec<String>;
}

impl TextFiles for BTreeMap<String, String> {
    fn text(&self, path: &str) -> Result<Option<String>, NoText> {
        Ok(self.get(path).cloned())
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let directory = format!("{}/", directory.trim_end_matches('/'));
        let names: BTreeSet<&str> = self
            .keys()
            .filter_map(|path| path.strip_prefix(&directory)?.split('/').next())
            .collect();
        names.into_iter().map(str::to_owned).collect()
    }
}

impl TextFiles for Root<'_> {
    fn text(&self, path: &str) -> Result<Option<String>, NoText> {
        let Some((_, entry)) = self.resolve(path) else {
            return Ok(None);
        };
        match entry.kind {
            FileKind::File => {}
            FileKind::Directory | FileKind::Link(_) => return Err(NoText::Directory),
            FileKind::Special => return Err(NoText::Special),
        }
        let bytes = self.read(path, LARGEST + 1).ok_or(NoText::Unopened)?;
        if bytes.len() > LARGEST {
            return Err(NoText::TooLarge);
        }
        String::from_utf8(bytes).map(Some).map_err(|_| NoText::NotUtf8)
    }

    fn names(&self, directory: &str) -> Vec<String> {
        Root::names(self, directory)
    }
}

/// The merged configuration of an engine. A setting that the files leave to the engine's default is `None` or empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Configuration {
    /// The files that were read, in the engine's order. Later ones win.
    pub files: Vec<String>,
    /// The format version of containerd's first file: 1 if the file states no version, `None` if the file is missing or empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<i64>,
    /// The name of the runtime for containers that request none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_runtime: Option<String>,
    /// The file that sets `default_runtime`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_runtime_file: Option<String>,
    /// The runtimes by name; containerd and CRI-O call this name the handler.
    pub runtimes: BTreeMap<String, OciRuntime>,
    /// Whether the engine injects CDI devices: containerd's `enable_cdi`, Docker's `features.cdi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi: Option<bool>,
    /// The directories that the engine searches for CDI specs.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cdi_spec_dirs: Vec<String>,
    /// containerd's `imports` from all files, as they are written.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub imports: Vec<String>,
    /// containerd's `disabled_plugins` from all files, each name once.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disabled_plugins: Vec<String>,
    /// The sections of containerd's CRI plugin that are in a file and that this release of containerd does not use (see
    /// [`containerd::effective`]).
    #[serde(skip)]
    pub ignored: Vec<Ignored>,
    /// The engine's cgroup driver: `systemd` or `cgroupfs` (Docker's `exec-opts`, CRI-O's `cgroup_manager`). containerd instead has one setting
    /// for each runtime, see [`OciRuntime::systemd_cgroup`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup_driver: Option<String>,
}

/// A section that containerd does not use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ignored {
    /// The file.
    pub path: String,
    /// The version that the file states; 0 if it states none.
    pub version: i64,
    /// The key below `plugins`.
    pub section: &'static str,
}

/// An OCI runtime that is registered with an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct OciRuntime {
    /// The runtime's program: `BinaryName` in containerd, `runtime_path` in CRI-O, `path` in Docker.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The value of `runtime_type`, such as `io.containerd.runc.v2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_type: Option<String>,
    /// containerd's `SystemdCgroup`: whether the runtime uses systemd as its cgroup driver.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub systemd_cgroup: Option<bool>,
    /// Docker's `runtimeArgs`. If there are none, the value of `args`, which Docker ignores but NVIDIA's tool writes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// The last file that mentions this runtime.
    pub file: String,
}

fn stated(version: i64) -> String {
    match version {
        0 => "no version".to_owned(),
        version => format!("version {version}"),
    }
}

/// Why an engine's files cannot be read or edited. No file has been changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A file exists but cannot be used.
    #[error("{path} cannot be read: {why}")]
    Unreadable {
        /// The path of the file.
        path: String,
        /// The reason, as the end of the message.
        why: String,
    },
    /// A file has a syntax error.
    #[error("{}; the engine also rejects this file. Correct this line, then run the command again; nothing was changed", self.found())]
    Syntax {
        /// The path of the file.
        path: String,
        /// `JSON` or `TOML`.
        format: &'static str,
        /// The line of the error, counted from 1.
        line: usize,
        /// The column of the error, counted from 1.
        column: usize,
        /// The parser's message.
        what: String,
    },
    /// A JSON file has too many values to edit in a reasonable time.
    #[error(
        "{path} has {parts} lines and values, and divvy edits files with at most {most}: remove empty lines and unused entries, then run the command again; nothing was changed"
    )]
    TooLong {
        /// The path of the file.
        path: String,
        /// The number of lines and values in the file.
        parts: usize,
        /// The maximum number of lines and values in a file that divvy edits.
        most: usize,
    },
    /// A value has a type that the engine does not accept.
    #[error("{}; correct this value, then run the command again; nothing was changed", self.found())]
    WrongType {
        /// The path of the file.
        path: String,
        /// The line of the value, counted from 1.
        line: usize,
        /// The column of the value, counted from 1.
        column: usize,
        /// The key, with dots between its parts.
        key: String,
        /// The value or type in the file.
        found: String,
        /// The type that the engine expects.
        wanted: &'static str,
        /// The engine's name.
        engine: &'static str,
    },
    /// The engine does not start because of a file's format version.
    #[error("{path} has {}, and {why}, so this containerd does not start with it", stated(*.version))]
    Version {
        /// The path of the file.
        path: String,
        /// The version that the file states; 0 if it states none.
        version: i64,
        /// The rule of this release.
        why: String,
    },
    /// The engine reads another file later, and that file overrides the edit.
    #[error(
        "{what} cannot be set in {path}: the engine reads {winner} later, and that file wins. Remove the setting from {winner}, or write to that \
         file with --drop-in {winner}; nothing was changed"
    )]
    Overruled {
        /// The file that would be edited.
        path: String,
        /// The setting that would have no effect.
        what: String,
        /// The file that overrides the setting.
        winner: String,
    },
    /// The file that keeps the original texts for [`undo`] is damaged.
    #[error(
        "{path} is not the record that divvy wrote, so the original configuration is unknown: {why}; remove the record to continue without it, \
         and --undo removes only the runtime; nothing was changed"
    )]
    Record {
        /// The path of the record's file.
        path: String,
        /// The reason, as the end of the message.
        why: String,
    },
    /// A template of k3s or rke2 already has a handwritten table for the runtime.
    #[error(
        "{path} already has a table for the runtime {name}, written by hand, and a second one would keep containerd from starting. Remove it, or choose another name with --runtime-name; nothing was changed"
    )]
    InTemplate {
        /// The path of the template.
        path: String,
        /// The runtime's name.
        name: String,
    },
    /// k3s or rke2 found the runtime in its `PATH` and registered it.
    #[error(
        "{path}: the distribution has already registered the runtime {name} ({program}), and a second table of that name would keep containerd \
         from starting. Use that runtime, or choose another name, such as --runtime-name divvy; nothing was changed"
    )]
    FoundByItself {
        /// The file that the distribution generated.
        path: String,
        /// The runtime's name.
        name: String,
        /// The runtime's program.
        program: String,
    },
    /// containerd's files import more files than is plausible.
    #[error(
        "{path} imports more than {most} files; is one of its patterns too broad? `containerd config dump` lists them under `imports`"
    )]
    TooMany {
        /// The first file, whose imports were followed.
        path: String,
        /// The maximum number of files that are read.
        most: usize,
    },
}

impl Error {
    /// Return what was found, without what `divvy configure` tells its user to do.
    pub fn found(&self) -> String {
        match self {
            Error::Syntax {
                path,
                format,
                line,
                column,
                what,
            } => format!("{path} is not valid {format}: line {line}, column {column}: {what}"),
            Error::WrongType {
                path,
                line,
                column,
                key,
                found,
                wanted,
                engine,
            } => format!("{path}, line {line}, column {column}: `{key}` is {found}, but {engine} expects {wanted}"),
            other => other.to_string(),
        }
    }
}
