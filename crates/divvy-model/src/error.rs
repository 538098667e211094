use thiserror::Error as ThisError;

use crate::limits::{ERROR_BYTES, shortened};

/// An error in a value that another program or a user wrote.
#[derive(Debug, Clone, PartialEq, Eq, ThisError)]
pub enum Error {
    /// The text is not JSON, or its fields do not match the format.
    #[error("{what} cannot be read: {text}")]
    Json {
        /// The format's name, as shown to the user.
        what: &'static str,
        /// serde_json's description, with the line and column.
        text: String,
    },
    /// The format version is unknown: either a newer Divvy wrote the value, or the value is corrupt.
    #[error("{what} has version {found}; this Divvy reads {} (is another component newer?)", versions(*newest))]
    Version {
        /// The format's name, as shown to the user.
        what: &'static str,
        /// The value of the field `v`, as JSON.
        found: String,
        /// The newest version that this program reads.
        newest: u64,
    },
    /// The value is outside the range or grammar that the format allows.
    #[error("{what}: {text}")]
    Invalid {
        /// The name of the field, format, or resource.
        what: Box<str>,
        /// A sentence that says what was found and what is allowed.
        text: String,
    },
}

fn versions(newest: u64) -> String {
    match newest {
        1 => "version 1".to_owned(),
        u64::MAX => "version 1 and newer ones".to_owned(),
        _ => format!("versions 1 to {newest}"),
    }
}

impl Error {
    pub(crate) fn json(what: &'static str, source: &serde_json::Error) -> Self {
        Error::Json {
            what,
            // serde_json's error repeats an unexpected string in full, however long it is.
            text: shortened(&source.to_string(), ERROR_BYTES).into_owned(),
        }
    }

    pub(crate) fn invalid(what: impl Into<Box<str>>, text: impl Into<String>) -> Self {
        let (what, text) = (what.into(), text.into());
        let text = if text.len() > ERROR_BYTES {
            shortened(&text, ERROR_BYTES).into_owned()
        } else {
            text
        };
        Error::Invalid { what, text }
    }

    pub(crate) fn too_long(what: &'static str, bytes: usize, most: usize) -> Self {
        Error::invalid(what, format!("it has {bytes} bytes; at most {most} are read"))
    }
}
