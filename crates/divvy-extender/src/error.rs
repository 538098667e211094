/// Why the extender does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The flags contradict each other.
    #[error("{0}")]
    Flags(String),
    /// The process could not install its signal handlers.
    #[error("the program could not wait for signals: {0}")]
    Signals(#[source] std::io::Error),
    /// No client, or no cluster.
    #[error(transparent)]
    Cluster(#[from] divvy_kube::Error),
    /// The address is taken or not ours.
    #[error("the extender cannot listen on {address}: {source}; choose another with --listen ADDRESS:PORT")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// Plain HTTP where it is not only this machine that can connect.
    #[error(
        "--listen {address} without TLS lets everyone who can connect to it bind pods to nodes, and read which pods there are. Give it certificates \
         with --tls-secret NAMESPACE/NAME, or let it listen on this machine only with --listen 127.0.0.1:{port}; --insecure starts it as it is",
        port = address.port()
    )]
    PlainHttp {
        /// The address.
        address: std::net::SocketAddr,
    },
    /// The watches go on for ever by construction.
    #[error("the watch of pods or nodes ended by itself; without it nothing can be placed")]
    WatchEnded,
    /// Accepting connections ended.
    #[error("the extender stopped serving: {0}")]
    Serve(#[source] std::io::Error),
}
