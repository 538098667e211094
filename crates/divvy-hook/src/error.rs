//! The errors of this program. The container runtime copies the hook's standard error into its own error.

use std::io::{self, Write as _};
use std::process::ExitCode;

use divvy_oci::hook::arguments;
use thiserror::Error as ThisError;

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// A reason why the hook failed.
#[derive(Debug, ThisError)]
pub(crate) enum Error {
    /// The command line is wrong.
    #[error(transparent)]
    Arguments(#[from] arguments::HookArgumentError),
    /// The container's state on standard input, or its configuration, is wrong.
    #[error("{0}; only a container runtime should call this program, with the container's state as its input")]
    State(String),
    /// An operation on a file of the host failed.
    #[error("could not {what} {path}: {source}")]
    Host {
        what: &'static str,
        path: String,
        source: io::Error,
    },
    /// An operation on a path of the image failed, for example because the image's root is read-only or because links form a
    /// loop.
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

/// Print an error to standard error. If printing fails, there is no other place to report it.
pub(crate) fn complain(error: &Error) -> ExitCode {
    let _ = writeln!(std::io::stderr(), "divvy-hook: {error}");
    ExitCode::FAILURE
}
