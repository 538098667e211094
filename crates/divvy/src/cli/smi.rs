//! The command-line grammar of `divvy smi`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

/// Print nvidia-smi's table for this machine's NVIDIA GPUs, and which pod each process belongs to
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy smi
      the table of nvidia-smi, and below it the pods of the processes
  divvy smi --probe unix:/run/divvy/probe.sock
      in a pod of the agent: ask the probe of its node
  divvy smi -o json | jq '.processes[] | select(.pod) | {pid, usedMiB, pod: .pod.name}'

The table is as wide as that of the driver's own nvidia-smi, and the same values give the same text. N/A stands for what the driver does not return, ERR! \
for what it could not read. A lost GPU has a line above the table, and no rows in it.

The list of pods has the namespace, the name, and the containers that have a share of a GPU, as the agent recorded them when they started. A process may \
belong to any container of its pod. A pod without a record, such as one that got its GPU from another device plugin, is shown by its UID.

A process can change the name of its program. Characters other than printable ASCII are shown as question marks.

The command queries the driver through divvy-probe: through the one that runs for the agent, if there is one, otherwise through one that it starts. Run it as \
root on the node.

Exit status: 0 printed; 1 the driver did not answer, or there is no NVIDIA GPU.")]
pub struct SmiArgs {
    /// Output format [default: the table]
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<SmiOutput>,
    #[command(flatten)]
    pub machine: MachineArgs,
}

/// Which probe reads this machine's GPUs.
#[derive(Debug, Clone, Args)]
pub struct MachineArgs {
    /// The agent's directory, which contains the records of grants
    #[arg(
        long,
        env = "DIVVY_STATE_DIR",
        value_name = "DIR",
        default_value = "/var/lib/kubelet/plugins/divvy.dev"
    )]
    pub state_dir: PathBuf,
    /// Root directory of the node's /proc, for a divvy-probe that this command starts
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub sys_root: PathBuf,
    /// Root directory of the driver's installation, such as / or /run/nvidia/driver (a driver container)
    #[arg(long, env = "DIVVY_DRIVER_ROOT", value_name = "DIR", default_value = "/")]
    pub driver_root: PathBuf,
    /// The divvy-probe to run, or unix:SOCKET of a running one [default: STATE_DIR/probe/probe.sock, otherwise divvy-probe in this program's directory]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    pub probe: Option<String>,
    /// The driver's libnvidia-ml.so.1 [default: found by searching below the driver's root]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
}

/// Output formats of `divvy smi`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SmiOutput {
    /// One JSON object
    Json,
}
