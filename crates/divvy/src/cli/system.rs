//! The command-line grammar of `divvy nvidia-system`, the hidden command that implements `nvidia-ctk system`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The subcommands of `divvy nvidia-system`.
#[derive(Debug, Subcommand)]
pub enum SystemCommand {
    /// Create links in /dev/char to NVIDIA's device nodes, which runc needs with the systemd cgroup driver
    DevCharLinks(DevCharLinksArgs),
    /// Create NVIDIA's control device nodes in /dev
    DeviceNodes(DeviceNodesArgs),
    /// Print the libraries in the ld.so.cache of a driver's root
    PrintLdcache {
        /// Root directory of the driver's files
        #[arg(long, value_name = "DIR")]
        driver_root: PathBuf,
    },
}

/// The arguments of `divvy nvidia-system dev-char-links`.
#[derive(Debug, Args)]
pub struct DevCharLinksArgs {
    /// Directory of the links
    #[arg(long, value_name = "DIR")]
    pub at: PathBuf,
    /// Link all device nodes that the driver may create, not only those that exist
    #[arg(long)]
    pub all: bool,
    /// Create the control device nodes first
    #[arg(long)]
    pub with_nodes: bool,
    /// Print what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}

/// The arguments of `divvy nvidia-system device-nodes`.
#[derive(Debug, Args)]
pub struct DeviceNodesArgs {
    /// The directory that contains dev/
    #[arg(long, value_name = "DIR")]
    pub dev_root: PathBuf,
    /// Create the control device nodes
    #[arg(long)]
    pub control: bool,
    /// Print what would be done, and change nothing
    #[arg(long)]
    pub dry_run: bool,
}
