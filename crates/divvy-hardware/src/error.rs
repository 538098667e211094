//! Failures between a driver and the processes that read its GPUs.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The kind of a failure, as sent on the socket and in [`crate::client::Update::Unavailable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FailureCode {
    /// The driver's library exists, but the kernel module is not loaded or does not answer.
    DriverNotLoaded,
    /// The driver's library was not found or could not be loaded.
    LibraryNotFound,
    /// The driver denies access to this process.
    NoPermission,
    /// A driver call or an answer took too long.
    Timeout,
    /// A GPU fell off the bus, and the driver no longer answers for it.
    GpuLost,
    /// The probe cannot be reached, started, or kept alive.
    ProbeUnreachable,
    /// The other end of the socket does not follow the protocol.
    Protocol,
    /// The driver's files on the machine are missing, or belong to different versions.
    DriverFiles,
    /// The other end of the socket has too many clients or requests.
    Busy,
    /// The driver, or this GPU, cannot do what was asked.
    NotSupported,
    /// Any other failure, including codes of a newer probe.
    #[serde(other)]
    Unknown,
}

impl FailureCode {
    /// Return the code as sent on the socket, such as `driver_not_loaded`, for metrics and conditions.
    pub fn as_str(self) -> &'static str {
        match self {
            FailureCode::DriverNotLoaded => "driver_not_loaded",
            FailureCode::LibraryNotFound => "library_not_found",
            FailureCode::NoPermission => "no_permission",
            FailureCode::Timeout => "timeout",
            FailureCode::GpuLost => "gpu_lost",
            FailureCode::ProbeUnreachable => "probe_unreachable",
            FailureCode::Protocol => "protocol",
            FailureCode::DriverFiles => "driver_files",
            FailureCode::Busy => "busy",
            FailureCode::NotSupported => "not_supported",
            FailureCode::Unknown => "unknown",
        }
    }
}

impl FailureCode {
    /// Report whether the driver, its library, or its kernel module refused, and not the way to them. Trying again helps only after a
    /// change of the node.
    pub fn is_refusal(self) -> bool {
        match self {
            FailureCode::DriverNotLoaded
            | FailureCode::LibraryNotFound
            | FailureCode::NoPermission
            | FailureCode::GpuLost
            | FailureCode::DriverFiles
            | FailureCode::NotSupported
            | FailureCode::Unknown => true,
            FailureCode::Timeout | FailureCode::ProbeUnreachable | FailureCode::Protocol | FailureCode::Busy => false,
        }
    }
}

impl fmt::Display for FailureCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure as a value that the probe sends to its clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure.
    pub code: FailureCode,
    /// What was found and what to do, for a human reader.
    pub text: String,
}

impl Failure {
    /// Create a failure.
    pub fn new(code: FailureCode, text: impl Into<String>) -> Failure {
        Failure { code, text: text.into() }
    }

    /// Parse what [`fmt::Display`] writes. A text without a known code is of the kind [`FailureCode::Unknown`].
    pub(crate) fn parse(line: &str) -> Failure {
        let known = line.strip_suffix(')').and_then(|line| line.rsplit_once(" ("));
        let known = known.and_then(|(text, code)| Some((text, serde_json::from_value(code.into()).ok()?)));
        match known {
            Some((text, code)) if code != FailureCode::Unknown => Failure::new(code, text),
            _ => Failure::new(FailureCode::Unknown, line),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.code)
    }
}

/// The error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver failed, or the probe could not be reached.
    #[error("{0}")]
    Driver(Failure),
    /// The data on the probe's socket does not follow the protocol.
    #[error("the probe's socket: {0}")]
    Protocol(String),
    /// A socket, file, or process could not be used.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// The failed operation, such as `cannot listen at`.
        what: &'static str,
        /// The path that the operation was applied to.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

impl Error {
    pub(crate) fn io(what: &'static str, path: impl Into<PathBuf>, source: io::Error) -> Error {
        Error::Io {
            what,
            path: path.into(),
            source,
        }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        Error::Driver(failure)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any other text is kept as it is.
    #[test]
    fn a_printed_failure_is_read_with_its_code() {
        let failure = Failure::new(FailureCode::LibraryNotFound, "no library (a long story)");
        assert_eq!(Failure::parse(&failure.to_string()), failure);
        for text in ["it ended", "it ended (badly)", "(", ")", "", "library_not_found"] {
            assert_eq!(Failure::parse(text), Failure::new(FailureCode::Unknown, text));
        }
    }
}
