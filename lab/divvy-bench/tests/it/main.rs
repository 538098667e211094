//! The generated cluster and its API server, tested with the readers of `divvy-kube`.

mod api;
mod cluster;
