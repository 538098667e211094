//! A Kubernetes cluster in one process, for tests and for `divvy demo`.
//!
//! - [`api`]: the API server, an axum `Router` over a resourceVersion'd store
//! - [`node`]: a node: the kubelet's device manager on real Unix sockets, a container runtime that resolves CDI names
//! - [`scheduler`]: a scheduler loop that speaks the extender protocol as kube-scheduler does
//!
//! Everything here is a simulator and says so; what is real is what it is pointed at.

#![forbid(unsafe_code)]

pub mod api;
pub mod node;
pub mod scheduler;
