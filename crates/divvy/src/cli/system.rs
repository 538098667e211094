//! The grammar of `nvidia-ctk system`, in `divvy`'s words.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// What `nvidia-ctk system` does.
#[derive(Debug, Subcommand)]
pub enum SystemCommand {
    /// Links in /dev/char to NVIDIA's device nodes, by which runc's systemd driver of cgroups finds them
    DevCharLinks(DevCharLinksArgs),
    /// NVIDIA's control nodes in /dev
    DeviceNodes(DeviceNodesArgs),
}

/// Links by number.
#[derive(Debug, Args)]
pub struct DevCharLinksArgs {
    /// Where the links are
    #[arg(long, value_name = "DIR")]
    pub at: PathBuf,
    /// Of all nodes that the driver may make, and not of those that are there alone
    #[arg(long)]
    pub all: bool,
    /// The control nodes are made first
    #[arg(long)]
    pub with_nodes: bool,
    /// Say what would be done
    #[arg(long)]
    pub dry_run: bool,
}

/// Control nodes.
#[derive(Debug, Args)]
pub struct DeviceNodesArgs {
    /// The root of /dev
    #[arg(long, value_name = "DIR")]
    pub dev_root: PathBuf,
    /// Make them
    #[arg(long)]
    pub control: bool,
    /// Say what would be done
    #[arg(long)]
    pub dry_run: bool,
}
