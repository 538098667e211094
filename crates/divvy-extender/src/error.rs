use std::time::Duration;

use divvy_kube::in_words;

/// Why the extender could not start or has stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The flags contradict each other.
    #[error("{0}")]
    Flags(String),
    /// The process could not install its signal handlers.
    #[error("the program could not wait for signals: {0}")]
    Signals(#[source] std::io::Error),
    /// There is no usable client configuration, or the cluster cannot be reached.
    #[error(transparent)]
    Cluster(#[from] divvy_kube::Error),
    /// The address is in use, or does not belong to this machine.
    #[error("the extender cannot listen on {address}: {source}; choose another address with --listen ADDRESS:PORT")]
    Listen {
        /// The address of `--listen`.
        address: std::net::SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// `--listen` without TLS names an address that other machines can reach.
    #[error(
        "--listen {address} without TLS lets everyone who can connect to it bind pods to nodes and see the cluster's pods. Configure certificates \
         with --tls-secret NAMESPACE/NAME, or listen on this machine only with --listen 127.0.0.1:{port}; to start anyway, add --insecure",
        port = address.port()
    )]
    PlainHttp {
        /// The address of `--listen`.
        address: std::net::SocketAddr,
    },
    /// A watch ended, although watches run indefinitely by construction.
    #[error("the watch of pods or nodes ended unexpectedly; without it no pod can be placed")]
    WatchEnded,
    /// The server or the leader election panicked.
    #[error("the extender stopped serving: {0}")]
    Serve(#[source] std::io::Error),
}

/// Why a request to the API server has no usable answer.
// No `source`: the texts already contain the causes, and an error chain would print them twice.
#[derive(Debug, thiserror::Error)]
pub(crate) enum AskError {
    /// The request cannot be sent.
    #[error("{0}")]
    Request(http::Error),
    /// The API server refused or could not be reached.
    #[error("{}", in_words(.0))]
    Api(Box<kube::Error>),
    /// The answer is too large, or its connection broke.
    #[error("the body of the answer (HTTP {code}) could not be read to its end: {error}")]
    Body {
        code: u16,
        error: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There was no answer to a Binding, an eviction, or the read of a pod.
    #[error("no answer within {0:?}")]
    Late(Duration),
    /// There was no answer about the Lease or the Secret.
    #[error("the API server gave no answer within {0:?}")]
    ApiServerLate(Duration),
}

impl From<kube::Error> for AskError {
    fn from(error: kube::Error) -> AskError {
        AskError::Api(Box::new(error))
    }
}
