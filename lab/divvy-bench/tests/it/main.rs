//! The generated cluster and its API server, seen through the readers of `divvy-cluster`.

mod api;
mod cluster;
