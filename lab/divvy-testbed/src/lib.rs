//! A Kubernetes cluster in one process, for tests and for `divvy demo`.
//!
//! - [`api`]: the API server, an axum `Router` over a store with resource versions
//! - [`node`]: a node: the kubelet's device manager on real Unix sockets, and a container runtime that resolves CDI names
//! - [`scheduler`]: a scheduler loop that speaks the extender protocol as kube-scheduler does
//! - [`controllers`]: the parts of kube-controller-manager that the scenarios need
//! - [`simulated_driver`]: a machine's simulated driver
//! - [`cuda_program`]: a program in a container that uses a GPU
//! - [`programs`]: the real agent, probe, and extender as child processes
//! - [`embedded`]: the cluster that combines all of these
//! - [`scenario`]: the scenarios that are played on a cluster, embedded or real; [`story`]: the events that they report
//! - [`builders`]: pod manifests as users write them
//! - [`root`]: the directory in which a cluster keeps its files
//!
//! The modules above say what they simulate. The agent, the probe, the extender and the command line are the real programs.

#![forbid(unsafe_code)]

pub mod api;
pub mod builders;
pub mod controllers;
pub mod cuda_program;
pub mod embedded;
pub mod node;
pub mod programs;
pub mod real_driver;
pub mod root;
pub mod scenario;
pub mod scheduler;
pub mod simulated_driver;
pub mod story;
