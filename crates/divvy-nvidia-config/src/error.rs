/// What is wrong with a configuration. Where NVIDIA's programs have an error message, the text is the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The file cannot be read, or a flag or variable that overrides a part of it cannot be read.
    #[error("unable to load config: {0}")]
    Load(String),
    /// The content of the file is not allowed.
    #[error("unable to load config: unable to finalize config: unable to parse config file: error parsing config file: {0}")]
    File(String),
    /// A value is not allowed.
    #[error("unable to validate flags: {0}")]
    Flags(String),
}

impl Error {
    pub(crate) fn load(text: impl Into<String>) -> Error {
        Error::Load(text.into())
    }

    pub(crate) fn file(text: impl Into<String>) -> Error {
        Error::File(text.into())
    }

    /// Return the error for a value in the file that is not allowed, with the prefix that NVIDIA's programs add.
    pub(crate) fn decoding(text: impl std::fmt::Display) -> Error {
        Error::File(format!(
            "unmarshal error: error unmarshaling JSON: while decoding JSON: {text}"
        ))
    }

    pub(crate) fn flags(text: impl Into<String>) -> Error {
        Error::Flags(text.into())
    }
}
