use std::io;
use std::path::PathBuf;

/// What can go wrong, in words for the person who runs the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A Unix socket's address holds 108 bytes, one of them the NUL at the end.
    #[error("the socket path {} has {bytes} bytes, but a Unix socket's path may have at most 107: use a shorter directory", path.display())]
    PathTooLong {
        /// The longest path that would be needed.
        path: PathBuf,
        /// Its length.
        bytes: usize,
    },

    /// Prefixes are file names, and tell our stale sockets from other people's.
    #[error(
        "the socket prefix {prefix:?} cannot be used: it must be made of letters, digits, '-', '_' and '.', and not be empty"
    )]
    SocketPrefix {
        /// As it was given.
        prefix: String,
    },

    /// The file is there, but cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },

    /// A directory, a device or the like where a plain file belongs.
    #[error("{} is not a plain file, so it is not read", path.display())]
    NotAFile {
        /// What was found there.
        path: PathBuf,
    },

    /// Far beyond what a kubelet writes.
    #[error("{} has more than {limit} bytes, which no kubelet writes, so it is not read", path.display())]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The most bytes that are read.
        limit: u64,
    },

    /// Not a checkpoint, or one whose writing was cut short.
    #[error("{} is not a device manager checkpoint that can be understood: {reason}", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong, and where.
        reason: String,
    },

    /// podresources allows 100 calls per second to all its clients together.
    #[error("the kubelet's podresources at {} turns calls away because it has too many, for {seconds} s now", path.display())]
    Throttled {
        /// The socket.
        path: PathBuf,
        /// For how long it was tried.
        seconds: u64,
    },

    /// A call to podresources failed; the kubelet's text is kept.
    #[error("the kubelet's podresources at {} does not answer: {text}", path.display())]
    PodResources {
        /// The socket.
        path: PathBuf,
        /// The kubelet's text, or the transport's.
        text: String,
    },
}
