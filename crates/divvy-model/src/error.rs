use thiserror::Error as ThisError;

use crate::limits::{ERROR_BYTES, shortened};

/// What can be wrong with a value that came from outside.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// Not JSON, or not of the format's shape.
    #[error("{what} is not readable: {text}")]
    Json {
        /// Name of the format, for the user.
        what: &'static str,
        /// serde_json's description, with line and column.
        text: String,
    },
    /// A format version from a newer (or broken) Divvy.
    #[error("{what} has version {found}; this Divvy reads version 1 (is another component newer?)")]
    Version {
        /// Name of the format, for the user.
        what: &'static str,
        /// The `v` that was found, as JSON.
        found: String,
    },
    /// A value outside what the format allows.
    #[error("{what}: {text}")]
    Invalid {
        /// The field or format.
        what: &'static str,
        /// What was found and what is allowed.
        text: String,
    },
}

impl Error {
    pub(crate) fn json(what: &'static str, source: &serde_json::Error) -> Self {
        Error::Json {
            what,
            // serde_json repeats strings that it did not expect.
            text: shortened(&source.to_string(), ERROR_BYTES).into_owned(),
        }
    }

    pub(crate) fn invalid(what: &'static str, text: impl Into<String>) -> Self {
        let text = text.into();
        let text = match text.len() > ERROR_BYTES {
            true => shortened(&text, ERROR_BYTES).into_owned(),
            false => text,
        };
        Error::Invalid { what, text }
    }

    pub(crate) fn too_long(what: &'static str, bytes: usize, most: usize) -> Self {
        Error::invalid(what, format!("it has {bytes} bytes; at most {most} are read"))
    }
}
