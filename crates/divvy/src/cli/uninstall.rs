//! The command-line grammar of `divvy uninstall`.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::ClusterArgs;

/// Remove Divvy from the cluster: show what would be removed, and with --yes remove it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy uninstall
      show what would be removed and what you must do yourself; change nothing
  divvy uninstall --yes  remove Divvy
  divvy uninstall --yes --force
      even while pods hold GPU memory: they keep running, and their memory is no
      longer counted
  divvy uninstall --yes --labels  also remove the label gpushare=true from nodes
  divvy uninstall -o json | jq .nodes

The command removes the objects of Divvy's chart (found by their labels), the extender's Lease, the annotations divvy.dev/... of nodes, the labels nvidia.com/... that only Divvy wrote, and aliyun.com/gpu-mem, \
aliyun.com/gpu-count, amd.com/gpu, and gpu.intel.com/xe (where Divvy offers them) in the status of nodes. A kubelet restores these resources for up to five minutes after the agent has ended, so the command waits that long. You can interrupt it and run it again.

The command does not remove Divvy's entry in kube-scheduler's configuration, the files on the nodes, and the namespace: it prints how to remove them. If Helm installed Divvy, run helm uninstall first, and then this \
command.

Exit status: 0 shown or removed; 1 refused, or not everything could be removed.")]
pub struct UninstallArgs {
    /// The namespace of the agents and the extender
    #[arg(short, long, value_name = "NAME", default_value = "divvy-system")]
    pub namespace: String,
    /// The prefix of the objects' names: the release name given at installation
    #[arg(long, value_name = "NAME", default_value = "divvy")]
    pub name: String,
    /// Remove Divvy instead of only showing what would be removed
    #[arg(long, short)]
    pub yes: bool,
    /// Remove Divvy even if pods hold GPU memory
    #[arg(long, requires = "yes")]
    pub force: bool,
    /// Also remove the label gpushare=true from nodes
    #[arg(long)]
    pub labels: bool,
    /// How long to wait until the kubelets have removed the resources; 0s means do not wait
    #[arg(long, value_name = "TIME", default_value = "7m", value_parser = divvy_program::values::duration)]
    pub timeout: Duration,
    /// Output format [default: text]
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<UninstallOutput>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy uninstall`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum UninstallOutput {
    /// One JSON object
    Json,
}
