//! The generated cluster and its API server, seen through the readers of `divvy-kube`.

mod api;
mod cluster;
