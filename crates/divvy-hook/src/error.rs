//! What can be in the way. The container runtime puts standard error into its own error.

use std::io::{self, Write as _};
use std::process::ExitCode;

use divvy_oci::hook::arguments;
use thiserror::Error as ThisError;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Why the hook did not do its work.
#[derive(Debug, ThisError)]
pub(crate) enum Error {
    /// The command line.
    #[error(transparent)]
    Arguments(#[from] arguments::Error),
    /// What the container runtime says on standard input, or the container's configuration.
    #[error("{0}; a container runtime calls this program, with the container's state on standard input")]
    State(String),
    /// A file of the machine.
    #[error("could not {what} {path}: {source}")]
    Host {
        what: &'static str,
        path: String,
        source: io::Error,
    },
    /// A path of the image: its root cannot be written, or leads in circles.
    #[error("could not {what} {path} of the container: {source}")]
    Image {
        what: &'static str,
        path: String,
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn host(what: &'static str, path: &str, source: io::Error) -> Error {
        let path = path.to_owned();
        Error::Host { what, path, source }
    }

    pub(crate) fn image(what: &'static str, path: &str, source: impl Into<io::Error>) -> Error {
        let (path, source) = (path.to_owned(), source.into());
        Error::Image { what, path, source }
    }
}

/// Nobody is left to be told if that fails.
pub(crate) fn complain(error: &Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "divvy-hook: {error}");
    ExitCode::FAILURE
}
