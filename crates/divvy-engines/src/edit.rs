//! The settings that an engine should get, and the texts to write.

use serde::{Deserialize, Serialize};

use super::{NoText, TextFiles};

/// The settings that an engine should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuntimeSettings {
    /// The runtime's name: the handler of a RuntimeClass, and the argument of `docker run --runtime`.
    pub name: String,
    /// The path of the runtime's program.
    pub path: String,
    /// Whether the runtime is the default for containers that request none; `None` leaves the default unchanged.
    pub set_default: Option<bool>,
    /// Whether the engine injects CDI devices into containers; `None` leaves this unchanged.
    pub cdi: Option<bool>,
    /// Whether the kubelet's cgroup driver is systemd; `None` if it is unknown.
    pub systemd_cgroup: Option<bool>,
    /// Whether to rewrite an existing drop-in from the other files and discard its content, as NVIDIA's tool does.
    pub overwrite: bool,
    /// The configuration that the engine itself prints, as TOML (`containerd config dump`, `crio status config`). If it is given, it replaces
    /// the engine's files as the source that the runtime's settings are copied from.
    pub printed: Option<String>,
    /// The command that configures this engine, such as `divvy configure k3s`. The files that divvy writes name it: with `--undo` it removes them.
    pub command: String,
}

impl RuntimeSettings {
    /// Return the comment of a file that divvy writes.
    pub(crate) fn header(&self) -> String {
        format!("# Written by `{0}`; `{0} --undo` removes it.\n", self.command)
    }
}

/// The recorded texts of one file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Recorded {
    /// The text before divvy wrote the file; `None` if the file did not exist.
    pub original: Option<String>,
    /// The text that divvy wrote.
    pub written: String,
}

/// The files as they will be after `edits`, so that a plan can be checked before it is written.
pub(crate) struct EditedFiles<'f> {
    pub(crate) files: &'f dyn TextFiles,
    pub(crate) edits: Vec<(String, Option<String>)>,
}

impl TextFiles for EditedFiles<'_> {
    fn text(&self, path: &str) -> Result<Option<String>, NoText> {
        match self.edits.iter().rev().find(|(edited, _)| edited == path) {
            Some((_, text)) => Ok(text.clone()),
            None => self.files.text(path),
        }
    }

    fn names(&self, directory: &str) -> Vec<String> {
        let mut names = self.files.names(directory);
        for (path, text) in &self.edits {
            let below = path
                .strip_prefix(directory.trim_end_matches('/'))
                .and_then(|rest| rest.strip_prefix('/'));
            let Some(below) = below else { continue };
            match (below.split_once('/'), text) {
                // A directory that is created with its first file, unless it already exists.
                (Some((name, _)), Some(_)) if !names.iter().any(|known| known == name) => names.push(name.to_owned()),
                (Some(_), _) => {}
                (None, text) => {
                    names.retain(|known| known != below);
                    if text.is_some() {
                        names.push(below.to_owned());
                    }
                }
            }
        }
        names.sort_unstable();
        names
    }
}

/// The new text of one file, which may equal its current text.
pub(crate) struct Write {
    pub(crate) path: String,
    pub(crate) text: String,
    pub(crate) like: Option<String>,
}
