//! What each of Divvy's programs does at its start and at its end.
//!
//! - [`run`]: the log, the runtime, and the exit status
//! - [`until_stopped`]: cancels a daemon at SIGTERM, SIGINT, SIGQUIT, or the end of standard input
//! - [`ContextArgs`]: the flags that select the cluster
//! - [`values`]: parsers of flags' values

#![forbid(unsafe_code)]

mod run;
mod stop;
pub mod values;

use std::path::PathBuf;

pub use run::{fail, run};
pub use stop::until_stopped;

/// The error of a check that could not reach a result, with the reason. It sets exit status 2.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unclear(pub String);

/// The flags that select the cluster, for a program that runs inside a cluster.
#[derive(Debug, Clone, clap::Args)]
pub struct ContextArgs {
    /// The kubeconfig file, or several separated by colons [default: $KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig context to use
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}
