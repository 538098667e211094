use std::io;
use std::path::PathBuf;

/// The errors of this crate. Each text is meant for the operator.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The socket's path does not fit into a Unix socket address, which holds 108 bytes including the final NUL.
    #[error("the socket path {} has {bytes} bytes, but a Unix socket's path may have at most 107: use a shorter directory", path.display())]
    PathTooLong {
        /// The longest path that the plugin needs.
        path: PathBuf,
        /// The path's length in bytes.
        bytes: usize,
    },

    /// The prefix cannot be used. It becomes part of a file name, and it distinguishes this plugin's stale sockets from other
    /// sockets.
    #[error(
        "the socket prefix {prefix:?} cannot be used: it must not be empty, and may contain only letters, digits, '-', '_' and '.'"
    )]
    SocketPrefix {
        /// The prefix as the caller specified it.
        prefix: String,
    },

    /// The file exists but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },

    /// Something else, such as a directory or a device, was found in place of a regular file.
    #[error("{} is not a regular file, so it is not read", path.display())]
    NotAFile {
        /// The path.
        path: PathBuf,
    },

    /// The file is far larger than any file that a kubelet writes.
    #[error("{} is larger than {limit} bytes, which a kubelet never writes, so it is not read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The size limit in bytes.
        limit: u64,
    },

    /// The file is not a checkpoint, or it was not written completely.
    #[error("{} is not a valid device manager checkpoint: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where in the file.
        reason: Malformed,
    },
}

/// What is wrong with the text of a checkpoint, and where.
// No `source`: the text already contains the cause, and an error chain would print it twice.
#[derive(Debug, thiserror::Error)]
pub enum Malformed {
    /// The text is not JSON, or its fields do not match the format.
    #[error("{0}")]
    Json(serde_json::Error),
    /// A key in `DeviceIDs` is not a NUMA node.
    #[error("{0:?} in DeviceIDs is not a NUMA node's number")]
    NumaNode(String),
}
