/// What is wrong with a configuration. Where NVIDIA's programs have an error message, the text is the same.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The configuration is not allowed for GPU feature discovery.
    #[error("unable to load config: {0}")]
    Load(String),
    /// The content of the file is not allowed.
    #[error("unable to load config: unable to finalize config: unable to parse config file: error parsing config file: {0}")]
    File(String),
    /// A value is not allowed.
    #[error("unable to validate flags: {0}")]
    Flags(String),
    /// A flag or a variable has a value of another type.
    #[error("{0}")]
    Value(String),
    /// A flag of `config-manager` that needs a value has none.
    #[error("invalid <{0}>: must not be empty string")]
    Missing(&'static str),
    /// `--fallback-strategies` contains an unknown name.
    #[error("unknown fallback strategy: {0}")]
    UnknownFallback(String),
    /// There is no file to choose.
    #[error("no configuration files available")]
    NoFiles,
    /// No file has the name of the label's value, or of `--default-config`.
    #[error("specified config {0} does not exist")]
    NoSuchConfig(String),
    /// The node has no label, there is no default, and no fallback applies.
    #[error("no config was set, no default was provided, and all fallbacks failed")]
    NothingChosen,
}

impl Error {
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
