//! The symbolic link to the chosen configuration file.

use std::fs;
use std::io::{self, ErrorKind, Read as _};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use divvy_nvidia_config::Available;

use crate::config_files::{self, BYTES};
use crate::files::{self, FileError};

/// What the name of the file with the last content that was signalled has after the link's name.
const TOLD: &str = ".told";

/// Why a node does not get the configuration that it should.
#[derive(Debug, thiserror::Error)]
pub(super) enum SwitchError {
    #[error("error getting list of configuration files: error reading directory: {path}: {1}", path = .0.display())]
    List(PathBuf, #[source] io::Error),
    #[error(
        "{path} is not a symbolic link, and config-manager does not replace what it has not made; remove {path}, or set another --config-file-dst \
         (CONFIG_FILE_DST)",
        path = .0.display()
    )]
    NotALink(PathBuf),
    #[error("error checking if file '{path}' exists: {1}", path = .0.display())]
    Look(PathBuf, #[source] io::Error),
    #[error("the configuration file {path} cannot be used: {1}", path = .0.display())]
    Read(PathBuf, #[source] io::Error),
    #[error("{0}, so an edit while config-manager does not run would not be signalled")]
    Keep(#[source] FileError),
    #[error("error creating symlink: {path}: {1}", path = .0.display())]
    Link(PathBuf, #[source] io::Error),
}

/// Return the files of a directory that can be chosen.
pub(super) fn available(directory: &Path) -> Result<Available, SwitchError> {
    config_files::available(directory).map_err(|error| SwitchError::List(directory.to_owned(), error))
}

/// The symbolic link to the configuration that is in use.
pub(super) struct Destination(PathBuf);

impl Destination {
    pub(super) fn new(path: PathBuf) -> Destination {
        Destination(path)
    }

    /// Return the path to which the link points. Nothing needs to exist at that path. `None` if there is no link.
    ///
    /// # Errors
    /// Fails if a file or a directory is in the place of the link. This program does not replace it.
    pub(super) fn target(&self) -> Result<Option<PathBuf>, SwitchError> {
        match fs::read_link(&self.0) {
            Ok(target) => Ok(Some(target)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == ErrorKind::InvalidInput => Err(SwitchError::NotALink(self.0.clone())),
            Err(error) => Err(SwitchError::Look(self.0.clone(), error)),
        }
    }

    /// Report whether the link leads to something that can be read.
    pub(super) fn is_usable(&self) -> bool {
        fs::metadata(&self.0).is_ok_and(|about| !about.is_dir())
    }

    /// Read the content of the link's target, which is empty for a device such as `/dev/null`. A relative target starts in the link's directory.
    pub(super) fn content(&self, target: &Path) -> Result<Vec<u8>, SwitchError> {
        let path = self.0.parent().unwrap_or(Path::new("/")).join(target);
        config_files::read(&path).map_err(|error| SwitchError::Read(path, error))
    }

    /// Return the content that the programs which read the link have been told of, or `None` if that is not known.
    pub(super) fn told(&self) -> Option<Vec<u8>> {
        let mut content = Vec::new();
        let opened = files::open(&self.beside(TOLD)).ok()?;
        opened.take(BYTES + 1).read_to_end(&mut content).ok()?;
        (content.len() as u64 <= BYTES).then_some(content)
    }

    /// Keep the content that the programs which read the link have been told of, for the next run of this program.
    pub(super) fn keep_told(&self, content: &[u8]) -> Result<(), SwitchError> {
        let path = self.beside(TOLD);
        let directory = path.parent().unwrap_or(Path::new("/"));
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        files::write_atomic(directory, &name, content, 0o644).map_err(SwitchError::Keep)
    }

    /// Return the path of a file next to the link.
    fn beside(&self, suffix: &str) -> PathBuf {
        let mut name = self.0.file_name().unwrap_or_default().to_owned();
        name.push(suffix);
        self.0.with_file_name(name)
    }

    /// Let the link point to another target. There is a link at every moment.
    pub(super) fn link_to(&self, target: &Path) -> Result<(), SwitchError> {
        let fail = |error| SwitchError::Link(self.0.clone(), error);
        let next = self.beside(".next");
        match fs::remove_file(&next) {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(fail(error)),
            _ => {}
        }
        symlink(target, &next).map_err(fail)?;
        fs::rename(&next, &self.0).map_err(fail)
    }
}
