//! What can go wrong between a driver and whoever wants to know about GPUs.

use std::fmt;
use std::io;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// What kind of failure, on the wire and in [`crate::client::Update::Unavailable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// The library is there, the kernel module is not, or does not answer.
    DriverNotLoaded,
    /// The driver's library was not found or could not be loaded.
    LibraryNotFound,
    /// The driver refuses this process.
    NoPermission,
    /// A call or an answer took too long.
    Timeout,
    /// A GPU fell off the bus, and the driver answers nothing for it.
    GpuLost,
    /// The probe cannot be reached, started or kept alive.
    ProbeUnreachable,
    /// The other side of the socket does not follow the protocol.
    Protocol,
    /// The driver's files on the machine are not there, or do not belong together.
    DriverFiles,
    /// The other side has too many clients or requests.
    Busy,
    /// Anything else, and codes of a newer probe.
    #[serde(other)]
    Unknown,
}

impl Code {
    /// As on the wire, `driver_not_loaded`: for metrics and conditions.
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
            Code::Unknown => "unknown",
        }
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A failure as a value: it travels from the probe to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What kind.
    pub code: Code,
    /// What was found and what to do, for people.
    pub text: String,
}

impl Failure {
    /// A failure of this kind.
    pub fn new(code: Code, text: impl Into<String>) -> Failure {
        Failure { code, text: text.into() }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({})", self.text, self.code)
    }
}

/// This crate's error.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The driver, or the way to it, failed.
    #[error("{0}")]
    Driver(Failure),
    /// What arrived on the probe's socket is not the protocol.
    #[error("the probe's socket: {0}")]
    Protocol(String),
    /// A socket, file or process could not be used.
    #[error("{what} {}: {source}", path.display())]
    Io {
        /// What was tried, `cannot listen at`.
        what: &'static str,
        /// On what.
        path: PathBuf,
        /// Why not.
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
