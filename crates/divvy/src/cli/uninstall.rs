//! The grammar of `divvy uninstall`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::ClusterArgs;

/// Take Divvy off the cluster: show what would be removed, and with --yes remove it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy uninstall
      what would be removed, and what is left to you; changes nothing
  divvy uninstall --yes  remove it
  divvy uninstall --yes --force
      the same while pods hold GPU memory: they run on, and nobody counts their
      memory
  divvy uninstall --yes --labels  take the label of GPU nodes away, too
  divvy uninstall -o json | jq .nodes

Removed are the objects that `divvy manifests` made (by their labels), the extender's Lease, the annotations divvy.dev/... of nodes, and aliyun.com/gpu-mem and \
aliyun.com/gpu-count in the status of nodes. A kubelet writes these two again for five minutes after the agent has ended, so the command waits for that; it may be interrupted, and run again.

Not removed, but printed with what to type: Divvy's entry in kube-scheduler's configuration, files on the nodes, the namespace. What Helm installed is removed by helm uninstall; run this \
command after it.

Exit status: 0 shown or removed, 1 refused, or not all of it could be removed.")]
pub struct UninstallArgs {
    /// The namespace of agents and extender
    #[arg(short, long, value_name = "NAME", default_value = "divvy-system")]
    pub namespace: String,
    /// The beginning of the objects' names, as for `divvy manifests`
    #[arg(long, value_name = "NAME", default_value = "divvy")]
    pub name: String,
    /// Remove it
    #[arg(long, short)]
    pub yes: bool,
    /// Remove it though pods hold GPU memory
    #[arg(long, requires = "yes")]
    pub force: bool,
    /// Take the label gpushare=true from nodes as well
    #[arg(long)]
    pub labels: bool,
    /// How long to wait for kubelets to forget the two resources; 0s: do not wait
    #[arg(long, value_name = "TIME", default_value = "7m", value_parser = divvy_agent::config::parse_duration)]
    pub timeout: Duration,
    /// Print this instead of text
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<UninstallOutput>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// How to print what would be or was removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UninstallOutput {
    /// One object
    Json,
}
