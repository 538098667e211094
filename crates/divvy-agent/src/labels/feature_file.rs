//! Writes labels to a feature file, from which Node Feature Discovery takes them.

use std::path::{Path, PathBuf};

use divvy_labels::{Labels, file};

use crate::files::{self, FileError, LIMIT};

/// Where Node Feature Discovery's worker looks for feature files, below the node's root.
const DIRECTORY: &str = "etc/kubernetes/node-feature-discovery/features.d";
/// The name of the file that NVIDIA's GPU feature discovery writes. A node that moves from that program has one file, not two.
const NAME: &str = "gfd";

/// A feature file. It stays when the program ends: a restart must not take the labels from the node.
#[derive(Debug, Clone)]
pub(crate) struct FeatureFile {
    directory: PathBuf,
    name: String,
}

impl FeatureFile {
    /// Return the file at the path of NVIDIA's GPU feature discovery, below the node's root.
    pub(crate) fn below(root: &Path) -> FeatureFile {
        FeatureFile {
            directory: root.join(DIRECTORY),
            name: NAME.to_owned(),
        }
    }

    /// Return the file at this path, or `None` if it cannot be the path of a file.
    pub(crate) fn at(path: &Path) -> Option<FeatureFile> {
        Some(FeatureFile {
            directory: path.parent()?.to_owned(),
            name: path.file_name()?.to_str()?.to_owned(),
        })
    }

    /// Return the file's path.
    pub(crate) fn path(&self) -> PathBuf {
        self.directory.join(&self.name)
    }

    /// Report whether the file exists with exactly these labels.
    pub(crate) fn has(&self, labels: &Labels) -> bool {
        let text = files::read(&self.path(), LIMIT);
        text.is_ok_and(|text| text.as_deref() == Some(file(labels).as_str()))
    }

    /// Write the file, unless it has these labels. Report whether it was written.
    ///
    /// # Errors
    /// The error has the path and the system's error. The old file is then unchanged.
    pub(crate) fn write(&self, labels: &Labels) -> Result<bool, FileError> {
        if self.has(labels) {
            return Ok(false);
        }
        files::make_directory(&self.directory, 0o755)?;
        files::remove_temporary(&self.directory, |name| name == self.name)?;
        files::write_atomic(&self.directory, &self.name, file(labels).as_bytes(), 0o644)?;
        Ok(true)
    }
}
