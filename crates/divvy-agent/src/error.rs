use std::net::SocketAddr;

use divvy_agent_core::TooManyIds;

/// Why the agent cannot run. What may pass (no driver, no kubelet, no API server) is none of these: it is logged, makes
/// `/readyz` fail, and is tried again for ever.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file or directory of the agent's own.
    #[error(transparent)]
    File(#[from] crate::files::FileError),
    /// The configuration.
    #[error("{origin}: {text}")]
    Config {
        /// Flag, variable, or file.
        origin: String,
        /// What was found, what is allowed.
        text: String,
    },
    /// The cluster's configuration.
    #[error(transparent)]
    Cluster(#[from] divvy_kube::Error),
    /// The unit does not fit this node's GPUs.
    #[error(transparent)]
    TooManyIds(#[from] TooManyIds),
    /// The kubelet's directory cannot be used.
    #[error(transparent)]
    Kubelet(#[from] divvy_kubelet::Error),
    /// The address of `--metrics`.
    #[error("cannot listen on {address} for /healthz, /readyz and /metrics: {source}. Choose another --metrics ADDRESS:PORT")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A part of the agent ended by itself.
    #[error("{part} ended unexpectedly: {text}")]
    Ended {
        /// Which.
        part: &'static str,
        /// How.
        text: String,
    },
}
