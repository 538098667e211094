/// What is wrong with a configuration. The texts are those of NVIDIA's programs, where these have one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// The file, or a flag or variable that replaces a part of it, cannot be read.
    #[error("unable to load config: {0}")]
    Load(String),
    /// A value is not allowed.
    #[error("unable to validate flags: {0}")]
    Flags(String),
}

impl Error {
    pub(crate) fn load(text: impl Into<String>) -> Error {
        Error::Load(text.into())
    }

    pub(crate) fn flags(text: impl Into<String>) -> Error {
        Error::Flags(text.into())
    }
}
