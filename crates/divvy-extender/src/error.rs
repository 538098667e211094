/// Why the extender does not run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// No client, or no cluster.
    #[error(transparent)]
    Cluster(#[from] divvy_cluster::Error),
    /// The address is taken or not ours.
    #[error("the extender cannot listen on {address}: {source}; choose another with --listen ADDRESS:PORT")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// What the system says.
        source: std::io::Error,
    },
    /// The watches go on for ever by construction.
    #[error("the watch of pods or nodes ended by itself; without it nothing can be placed")]
    WatchEnded,
    /// Accepting connections ended.
    #[error("the extender stopped serving: {0}")]
    Serve(#[source] std::io::Error),
}
