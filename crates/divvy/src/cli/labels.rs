//! The command-line grammar of `divvy labels`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use super::ClusterArgs;

/// Show the node labels that describe this machine's NVIDIA GPUs, and with --apply write them to its node
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy labels                    the labels, one KEY=VALUE per line
  divvy labels -o json | jq -r '.[\"nvidia.com/gpu.product\"]'
  divvy labels --apply --node gpu-1
      write them to the node gpu-1, once; `divvy agent --labels node` keeps them
      up to date
  kubectl get nodes -L nvidia.com/gpu.product,nvidia.com/gpu.memory
  kubectl get nodes -l 'nvidia.com/gpu.memory>40000'
      the nodes whose largest GPU has more than 40000 MiB

The labels are those of NVIDIA's GPU feature discovery, without the time at which they were made. The command queries the driver through divvy-probe. Run it as root, \
otherwise nvidia.com/vgpu.present is false on every machine.

With --apply, the command changes no label that another program or a person has set to another value. It names such labels. Labels that it wrote before and that no longer \
apply disappear. To remove them all:
  echo '{\"apiVersion\":\"v1\",\"kind\":\"Node\",\"metadata\":{\"name\":\"gpu-1\"}}' |
      kubectl apply --server-side --field-manager divvy-labels -f -

Exit status: 0 printed and, with --apply, written; 1 the driver or the API server did not answer, or refused.")]
pub struct LabelsArgs {
    /// Also write the labels to the node that --node names
    #[arg(long, requires = "node")]
    pub apply: bool,
    /// With --apply: the name of this machine's node
    #[arg(long, value_name = "NAME", requires = "apply")]
    #[cfg_attr(feature = "completions", arg(add = super::ArgValueCompleter::new(super::completions::nodes)))]
    pub node: Option<String>,
    /// Output format [default: KEY=VALUE lines]
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<LabelsOutput>,
    /// Root directory of the driver's installation, such as / or /run/nvidia/driver (a driver container)
    #[arg(long, env = "DIVVY_DRIVER_ROOT", value_name = "DIR", default_value = "/")]
    pub driver_root: PathBuf,
    /// The divvy-probe to run, or unix:SOCKET of a running one [default: divvy-probe in this program's directory]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    pub probe: Option<String>,
    /// The driver's libnvidia-ml.so.1 [default: found by searching below the driver's root]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy labels`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LabelsOutput {
    /// One JSON object
    Json,
}
