use std::net::SocketAddr;

use divvy_agent_core::TooManyIds;

/// Why the agent cannot run. A temporary failure (no driver, no kubelet, no API server) is not an [`Error`]: the agent logs it,
/// makes `/readyz` fail, and retries indefinitely.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The agent cannot use one of its own files or directories.
    #[error(transparent)]
    File(#[from] crate::files::FileError),
    /// The configuration is wrong.
    #[error("{origin}: {text}")]
    Config {
        /// The flag, environment variable, or file.
        origin: String,
        /// What was found, and what is allowed.
        text: String,
    },
    /// The cluster's configuration is wrong.
    #[error(transparent)]
    Cluster(#[from] divvy_kube::Error),
    /// The memory unit does not fit this node's GPUs.
    #[error(transparent)]
    TooManyIds(#[from] TooManyIds),
    /// The kubelet's directory cannot be used.
    #[error(transparent)]
    Kubelet(#[from] divvy_kubelet::Error),
    /// The program cannot listen on the address for its metrics.
    #[error("cannot listen on {address} for /healthz, /readyz and /metrics: {source}. Choose another {option}")]
    Listen {
        /// The address that was configured.
        address: SocketAddr,
        /// How the address is set.
        option: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// The agent cannot serve what NVIDIA's device plugin would serve.
    #[error("error starting plugins: {0}")]
    Plugin(String),
    /// The memory that the processes of MPS share cannot be mounted.
    #[error("{0}")]
    Mps(String),
    /// The node cannot be labelled.
    #[error("{0}")]
    Labels(String),
    /// `config-manager` cannot choose a configuration.
    #[error("{0}")]
    ConfigManager(String),
    /// A part of the agent ended unexpectedly.
    #[error("{part} ended unexpectedly: {text}")]
    Ended {
        /// The part that ended.
        part: &'static str,
        /// How the part ended.
        text: String,
    },
}
