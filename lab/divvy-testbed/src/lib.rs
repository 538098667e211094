//! A Kubernetes cluster in one process, for tests and for `divvy demo`.
//!
//! - [`api`]: the API server, an axum `Router` over a resourceVersion'd store
//! - [`node`]: a node: the kubelet's device manager on real Unix sockets, a container runtime that resolves CDI names
//! - [`scheduler`]: a scheduler loop that speaks the extender protocol as kube-scheduler does
//! - [`controllers`]: what of kube-controller-manager the scenarios need
//! - [`driver`]: a machine's simulated driver
//! - [`programs`]: the real agent, probe and extender as child processes
//! - [`embedded`]: all of it together
//! - [`scenario`]: what is played on a cluster, embedded or real; [`story`]: what is told of it
//! - [`builders`]: pods as users write them
//! - [`root`]: the folder that a cluster lives in
//!
//! What is simulated says so; the agent, the probe, the extender and the command line are the real ones.

#![forbid(unsafe_code)]

pub mod api;
pub mod builders;
pub mod controllers;
pub mod driver;
pub mod embedded;
pub mod node;
pub mod programs;
pub mod root;
pub mod scenario;
pub mod scheduler;
pub mod story;
