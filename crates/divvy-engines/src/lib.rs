//! What container engines are configured to do, and the edits that give them one more runtime: Docker's `daemon.json`, containerd's
//! `config.toml` with its imports, CRI-O's drop-ins. Text in, text out.
//!
//! - [`docker`], [`containerd`], [`crio`]: for each engine `read`, what its files say together, read as the engine reads them
//! - [`Configuration`]: the answer, the same for all three
//! - [`configure`]: from a [`Wish`] to a [`Plan`]: the texts that change, and a [`Record`] of what was there; [`undo`]: back again
//! - [`Engine`]: where the engines of distributions have their files
//! - [`Files`]: where the texts come from: a map, or a machine's tree below a [`Root`]

#![forbid(unsafe_code)]

pub mod containerd;
pub mod crio;
pub mod docker;
mod glob;
mod json;
mod places;
mod plan;
mod revert;
mod template;
mod text;
mod toml_text;

pub use places::{Engine, Wanted, runtime_class};
pub use plan::{Edit, Plan, Record, Recorded, Target, Wish, configure, undo};

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use divvy_host::{Kind, Root};

/// The largest file that is read, in bytes: engines' files are written by hand.
pub const LARGEST: usize = 4 * 1024 * 1024;

/// The texts of a machine. Paths are absolute.
pub trait Files {
    /// The text of a file; none if there is none.
    ///
    /// # Errors
    /// Why a file that is there has no text: no right to read it, not UTF-8, a folder.
    fn text(&self, path: &str) -> Result<Option<String>, String>;
    /// The names in a folder, sorted; none if there is no such folder.
    fn names(&self, folder: &str) -> Vec<String>;
}

impl Files for BTreeMap<String, String> {
    fn text(&self, path: &str) -> Result<Option<String>, String> {
        Ok(self.get(path).cloned())
    }

    fn names(&self, folder: &str) -> Vec<String> {
        let folder = format!("{}/", folder.trim_end_matches('/'));
        let names: BTreeSet<&str> = self
            .keys()
            .filter_map(|path| path.strip_prefix(&folder)?.split('/').next())
            .collect();
        names.into_iter().map(str::to_owned).collect()
    }
}

impl Files for Root<'_> {
    fn text(&self, path: &str) -> Result<Option<String>, String> {
        let Some((_, entry)) = self.resolve(path) else {
            return Ok(None);
        };
        match entry.kind {
            Kind::File => {}
            Kind::Folder | Kind::Link(_) => return Err("it is a folder".to_owned()),
            Kind::Special => return Err("it is a device, a socket or a pipe".to_owned()),
        }
        let bytes = self.read(path, LARGEST + 1).ok_or("it could not be opened")?;
        if bytes.len() > LARGEST {
            return Err(format!("it has more than {LARGEST} bytes"));
        }
        String::from_utf8(bytes)
            .map(Some)
            .map_err(|_| "it is not UTF-8 text".to_owned())
    }

    fn names(&self, folder: &str) -> Vec<String> {
        Root::names(self, folder)
    }
}

/// What an engine's files say together. What they leave to the engine is none or empty here.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Configuration {
    /// The files that were read, in the engine's order. Later ones win.
    pub files: Vec<String>,
    /// The version of containerd's format, of the first file: 1 where it says none, none where there is nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<i64>,
    /// The runtime of who asks for none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_runtime: Option<String>,
    /// The file that says so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub default_runtime_file: Option<String>,
    /// The runtimes, by name (containerd's and CRI-O's handlers).
    pub runtimes: BTreeMap<String, Runtime>,
    /// containerd's `enable_cdi`, Docker's `features.cdi`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cdi: Option<bool>,
    /// Where CDI specs are looked for.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub cdi_spec_dirs: Vec<String>,
    /// containerd's `imports`, as written, of all files.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub imports: Vec<String>,
    /// containerd's `disabled_plugins`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub disabled_plugins: Vec<String>,
    /// The cgroup driver of the whole engine: `systemd` or `cgroupfs` (Docker's `exec-opts`, CRI-O's `cgroup_manager`). containerd has one for each runtime.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cgroup_driver: Option<String>,
}

/// One runtime of an engine.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Runtime {
    /// The program (`BinaryName`, `runtime_path`, `path`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// The kind of runtime (`runtime_type`), such as `io.containerd.runc.v2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub runtime_type: Option<String>,
    /// containerd's `SystemdCgroup`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub systemd_cgroup: Option<bool>,
    /// Docker's `runtimeArgs`, or `args`, which it ignores.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// The last file that says something of it.
    pub file: String,
}

/// Why an engine's files cannot be read or edited. Nothing has been changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// A file that is there has no text.
    #[error("{path} cannot be read: {why}")]
    Unreadable {
        /// The file.
        path: String,
        /// The reason.
        why: String,
    },
    /// Not the format that the engine reads.
    #[error(
        "{path} is not {format}: line {line}, column {column}: {what}; the engine refuses this file as well. Correct that place, then run this again; nothing was changed"
    )]
    Syntax {
        /// The file.
        path: String,
        /// JSON or TOML.
        format: &'static str,
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
        /// What the parser says.
        what: String,
    },
    /// More than anybody writes into an engine's file.
    #[error(
        "{path} has {parts} lines and values, and at most {most} are edited: take out what is empty, then run this again; nothing was changed"
    )]
    TooLong {
        /// The file.
        path: String,
        /// Lines and values in it.
        parts: usize,
        /// How many it may have.
        most: usize,
    },
    /// A value of another type than the engine's.
    #[error(
        "{path}, line {line}, column {column}: `{key}` is {found}, where {engine} reads {wanted}; correct that place, then run this again; nothing was changed"
    )]
    WrongType {
        /// The file.
        path: String,
        /// From 1.
        line: usize,
        /// From 1.
        column: usize,
        /// The key, with dots.
        key: String,
        /// What is there.
        found: String,
        /// What should be.
        wanted: &'static str,
        /// Whose file.
        engine: &'static str,
    },
    /// Another file has the last word.
    #[error(
        "{what} cannot be set from {path}: {winner} is read after it and wins, so the engine would not see it. Take that out of {winner}, or write there \
         with --drop-in {winner}; nothing was changed"
    )]
    Overruled {
        /// Where it would be written.
        path: String,
        /// What would have no effect.
        what: String,
        /// The file that wins.
        winner: String,
    },
    /// What is kept for going back is not what we kept.
    #[error(
        "{path} is not as divvy wrote it, so what was there before cannot be told: {why}; remove it to go on without, and --undo takes out the runtime \
         alone; nothing was changed"
    )]
    Record {
        /// The record.
        path: String,
        /// The reason.
        why: String,
    },
    /// A template that says something of the runtime itself.
    #[error(
        "{path} already has a table for the runtime {name}, written by hand: a second one would stop containerd. Take it out, or choose another name with --runtime-name; nothing was changed"
    )]
    InTemplate {
        /// The template.
        path: String,
        /// The runtime.
        name: String,
    },
    /// What k3s found itself.
    #[error(
        "{path}: the distribution has found and registered a runtime {name} by itself ({program}); a second table of that name would stop containerd. \
         Use that one, or choose another name, such as --runtime-name divvy; nothing was changed"
    )]
    FoundByItself {
        /// What was generated.
        path: String,
        /// The runtime.
        name: String,
        /// Its program.
        program: String,
    },
    /// containerd's files import more files than anybody has.
    #[error(
        "{path} imports more than {most} files; is one of its patterns too wide? `containerd config dump` shows them under `imports`"
    )]
    TooMany {
        /// The first file.
        path: String,
        /// How many are read.
        most: usize,
    },
}
