//! The grammar of `divvy web`.

use clap::Args;

use super::ClusterArgs;

/// Show the cluster's GPUs on a web page: who has what, what is used, and why pods wait
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl divvy web              prints an address; open it in a browser on this machine
  kubectl divvy web --port 8080  at the same port each time

The page is served on 127.0.0.1 until Ctrl-C, and only to those who know the token in the address. It shows what you may see: it reads the cluster with your kubeconfig. What is used comes from the \
agents, through the API server: that needs the right to get pods/proxy in the agents' namespace.

From another machine, forward the port: ssh -L 8080:127.0.0.1:8080 HOST, with the same port on both ends.")]
pub struct WebArgs {
    /// The port on 127.0.0.1 [default: a free one]
    #[arg(long, value_name = "PORT", default_value_t = 0, hide_default_value = true)]
    pub port: u16,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}
