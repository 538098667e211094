//! The grammar of `divvy top`.

use std::time::Duration;

use clap::{Args, ValueEnum};
#[cfg(feature = "completions")]
use clap_complete::ArgValueCompleter;
use divvy_program::values::duration;

use super::ClusterArgs;
use super::smi::MachineArgs;
#[cfg(feature = "completions")]
use crate::commands::completions::cluster as completions;

/// Show what pods have of each GPU and what they use of it, until `q`
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl divvy top                the cluster; Enter shows a node or a pod, ? the other keys
  kubectl divvy top gpu-1 gpu-2    only these nodes
  kubectl divvy top --once         print it once, with all pods
  kubectl divvy top -o json | jq '.usage'
  kubectl divvy top -o json | jq '.waiting[] | {namespace, name, why}'
  sudo divvy top                   on a node: its GPUs and processes

What is allocated comes from the API server, as in `divvy inspect gpushare`. What is used comes from the agents, through the API server: that needs the right \
to get pods/proxy in the agents' namespace. Why pods wait is what `divvy why` says, and needs the right to list nodes and pods.

On a machine without a kubeconfig, or with --local, the command shows the GPUs of this machine. It queries the driver through divvy-probe, as divvy smi \
does, so run it as root. The agent's records say which pods have shares. Pods without a record are shown by their UIDs, and processes of the host by their \
names and PIDs.")]
pub struct TopArgs {
    /// Show only these nodes
    #[arg(value_name = "NODE")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::nodes)))]
    pub nodes: Vec<String>,
    /// Print all nodes once, with their GPUs and pods [default if the output is not a terminal]
    #[arg(long)]
    pub once: bool,
    /// Output format; implies --once
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<TopOutput>,
    /// How often to ask the agents of the nodes on the screen, at least 1s
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = duration)]
    pub interval: Duration,
    /// Draw with ASCII characters only [default in the locales C and POSIX]
    #[arg(short = 'U', long)]
    pub ascii: bool,
    /// Show the GPUs of this machine, and ask no cluster [default if there is no kubeconfig, and if --probe is given]
    #[arg(long, conflicts_with = "nodes")]
    pub local: bool,
    #[command(flatten)]
    pub machine: MachineArgs,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy top`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TopOutput {
    /// JSON: what `divvy inspect gpushare -o json` prints, what each node's agent says, and the waiting pods
    Json,
}
