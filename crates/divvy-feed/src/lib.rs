//! Reads what people look at from a cluster.
//!
//! - [`Agents`]: what the agents of nodes measured, through the API server
//! - [`waiting`]: the pods that wait for GPUs, each with its reason
//! - [`feed`]: keeps the web page up to date: the watches of nodes and pods, and both of the above for open pages
//! - `cluster`: the nodes and pods as the watches report them, without I/O
//!
//! `divvy top` uses the first two, and `divvy web` and the extender all of it.

#![forbid(unsafe_code)]

mod agents;
mod cluster;
mod feed;
mod waiting;

pub use agents::Agents;
pub use feed::feed;
pub use waiting::waiting;
