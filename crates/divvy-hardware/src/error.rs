//! Failures between a driver and the processes that read its GPUs.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The kind of a failure, as sent on the socket and in [`crate::client::Update::Unavailable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
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

impl Code {
    /// Return the code as sent on the socket, such as `driver_not_loaded`, for metrics and conditions.
    pub fn as_str(self) -> &'static str {
        match self {
            Code::DriverNotLoaded => "driver_not_loaded",
            Code::LibraryNotFound => "library_not_found",
            Code::NoPermission => "no_permission",
            Code::Timeout => "timeout",
            Code::GpuLost => "gpu_lost",
            Code::ProbeUnreachable => "probe_unreachable",
            Code::Protocol => "protocol",
            Code::DriverFiles => "driver_files",
            Code::Busy => "busy",
            Code::NotSupported => "not_supported",
            Code::Unknown => "unknown",
        }
    }
}

impl Code {
    /// Report whether the driver, its library, or its kernel module refused, and not the way to them. Trying again helps only after a
    /// change of the node.
    pub fn is_refusal(self) -> bool {
        match self {
            Code::DriverNotLoaded
            | Code::LibraryNotFound
            | Code::NoPermission
            | Code::GpuLost
            | Code::DriverFiles
            | Code::NotSupported
            | Code::Unknown => true,
            Code::Timeout | Code::ProbeUnreachable | Code::Protocol | Code::Busy => false,
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure as a value that the probe sends to its clients.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// The kind of failure.
    pub code: Code,
    /// What was found and what to do, for a human reader.
    pub text: String,
}

impl Failure {
    /// Create a failure.
    pub fn new(code: Code, text: impl Into<String>) -> Failure {
        Failure { code, text: text.into() }
    }

    /// Parse what [`fmt::Display`] writes. A text without a known code is of the kind [`Code::Unknown`].
    pub(crate) fn parse(line: &str) -> Failure {
        let known = line.strip_suffix(')').and_then(|line| line.rsplit_once(" ("));
        let known = known.and_then(|(text, code)| Some((text, serde_json::from_value(code.into()).ok()?)));
        match known {
            Some((text, code)) if code != Code::Unknown => Failure::new(code, text),
            _ => Failure::new(Code::Unknown, line),
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

    /// Any other text is kept.
    #[test]
    fn a_printed_failure_is_read_with_its_code() {
        let failure = Failure::new(Code::LibraryNotFound, "no library (a long story)");
        assert_eq!(Failure::parse(&failure.to_string()), failure);
        for text in ["it ended", "it ended (badly)", "(", ")", "", "library_not_found"] {
            assert_eq!(Failure::parse(text), Failure::new(Code::Unknown, text));
        }
    }
}
