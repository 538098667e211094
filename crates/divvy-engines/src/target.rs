//! An engine and its configuration files.

use super::{Configuration, Error, TextFiles, containerd, crio, docker};

/// The engine and its configuration files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineTarget {
    /// Docker, which has one file.
    Docker {
        /// The path of `daemon.json`.
        config: String,
    },
    /// containerd, with a main file and an optional drop-in.
    Containerd {
        /// The main file, which containerd reads first.
        config: String,
        /// The drop-in that receives the runtime; `None` writes the runtime into `config`.
        drop_in: Option<String>,
        /// How this version of containerd merges files; `None` if the version is unknown.
        merge: Option<containerd::Merge>,
        /// The format version for a new file.
        version: i64,
    },
    /// CRI-O, with a main file and an optional drop-in.
    Crio {
        /// The main file, which CRI-O reads first.
        config: String,
        /// The drop-in that receives the runtime; `None` writes the runtime into `config`.
        drop_in: Option<String>,
    },
    /// The template from which k3s or rke2 generates containerd's configuration at each start.
    Template {
        /// The path of the template.
        config: String,
        /// The file that was generated from the template at the last start.
        generated: String,
        /// The format version of containerd's configuration.
        version: i64,
    },
}

impl EngineTarget {
    /// Return the path of the engine's main file.
    pub fn config(&self) -> &str {
        match self {
            EngineTarget::Docker { config }
            | EngineTarget::Containerd { config, .. }
            | EngineTarget::Crio { config, .. }
            | EngineTarget::Template { config, .. } => config,
        }
    }

    /// Return the path of the file that keeps the [`OriginalTexts`](super::OriginalTexts).
    pub fn record(&self) -> String {
        format!("{}.divvy-undo", self.config())
    }

    /// Return the path of the file that receives the runtime: the drop-in if there is one, otherwise the main file.
    pub fn written(&self) -> &str {
        match self {
            EngineTarget::Containerd {
                drop_in: Some(drop_in), ..
            }
            | EngineTarget::Crio {
                drop_in: Some(drop_in), ..
            } => drop_in,
            _ => self.config(),
        }
    }

    pub(crate) fn merge(&self) -> containerd::Merge {
        match self {
            EngineTarget::Containerd { merge: Some(merge), .. } => *merge,
            // A file that is correct for older versions is correct for all versions.
            _ => containerd::Merge::Sections,
        }
    }

    /// Read and merge the engine's files.
    ///
    /// # Errors
    /// Fails with the errors of [`docker::read`], [`containerd::read`], and [`crio::read`].
    pub fn read(&self, files: &dyn TextFiles) -> Result<Configuration, Error> {
        match self {
            EngineTarget::Docker { config } => docker::read(files, config),
            EngineTarget::Containerd { config, .. } => containerd::read(files, config, self.merge()),
            EngineTarget::Crio { config, .. } => crio::read(files, config),
            EngineTarget::Template { generated, .. } => containerd::read(files, generated, containerd::Merge::Keys),
        }
    }

    pub(crate) fn is_json(&self) -> bool {
        matches!(self, EngineTarget::Docker { .. })
    }
}
