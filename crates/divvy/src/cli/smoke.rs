//! The command-line grammar of `divvy smoke`.

use std::time::Duration;

use anyhow::ensure;
use clap::{ArgGroup, Args, ValueEnum};
use divvy_model::limits::TEST_TIMEOUT;
use divvy_program::values::{duration, object_name};

use super::ClusterArgs;

/// Prove that GPUs compute: run kernels on them, and compare every byte of the results
#[derive(Debug, Args)]
#[command(
    group = ArgGroup::new("where").args(["all_nodes", "nodes", "here", "docker", "nerdctl", "podman"]).required(true),
    after_help = "\
Examples:
  divvy smoke --all-nodes            every GPU of the cluster
  divvy smoke --node gpu-1 --gpu 0   one GPU
  kubectl divvy smoke --node gpu-1 --isolation
      also allocate up to the limit of the share, and check that more is refused
  divvy smoke --all-nodes --report   also stop giving pods the GPUs that compute wrongly
  divvy smoke --all-nodes -o json | jq '.gpus[] | select(.result == \"FAIL\")'
  divvy smoke --node gpu-1 --image registry.example/training:7
      also prove that a container of this image gets the driver
  divvy smoke --here                 a GPU of this machine or container
  divvy smoke --docker               a GPU in a container of Docker, through CDI
  divvy smoke --docker --runtime nvidia
      the same through NVIDIA's container runtime

On a cluster, the command creates one pod for each GPU with room, from the image that the agents use, so that no image is pulled. The pods go through the scheduler and Divvy's extender, \
run without privileges and without a service account's token, and request 1 GiB of GPU memory, so that they may run next to others. The command deletes them at the end, at Ctrl-C, and when it is killed.

With --report, a GPU whose failure is its own goes out of service: an annotation on its node tells the agent not to offer it. Running pods are not touched. A later run with --report tests \
the GPU again, while no other pod gets it, and puts it back if it passes. This takes the right to patch nodes.

PASS  every step passed, or was skipped with a reason.   WARN  programs compute correctly, but something is not as it should be.   FAIL  the GPU computes wrong results, or no pod gets it.
SKIP  there was nothing to try: the GPU is full, its node is cordoned or not ready.   ERROR  the GPU could not be tried, for the printed reason.

Ways to give a GPU to a container, for --docker, --nerdctl, and --podman:
  --device nvidia.com/gpu=all   CDI (the default); Docker 25 or newer
  --gpus all                    the engine's own flag for NVIDIA's toolkit
  --runtime nvidia              NVIDIA's container runtime, if the engine knows it

Exit status: 0 passed; 1 a warning; 2 a GPU failed; 3 a GPU could not be tried, or there was nothing to try. With a container engine, its own status if it could not start the container (125 to 127)."
)]
pub struct SmokeArgs {
    /// Try every GPU of the cluster
    #[arg(long)]
    pub all_nodes: bool,
    /// Try the GPUs of this node (may be repeated)
    #[arg(long = "node", value_name = "NODE")]
    #[cfg_attr(feature = "completions", arg(add = clap_complete::ArgValueCompleter::new(crate::commands::completions::cluster::nodes)))]
    pub nodes: Vec<String>,
    /// Try a GPU of this machine or container
    #[arg(long)]
    pub here: bool,
    /// Try a GPU in a container of Docker on this machine
    #[arg(long)]
    pub docker: bool,
    /// Try a GPU in a container of nerdctl on this machine
    #[arg(long)]
    pub nerdctl: bool,
    /// Try a GPU in a container of Podman on this machine
    #[arg(long)]
    pub podman: bool,
    /// Only this GPU: its UUID, a prefix of it that only one GPU has, or its index on each node
    #[arg(long, value_name = "GPU")]
    pub gpu: Option<String>,
    /// The units of aliyun.com/gpu-mem that each pod requests [default: as many as make 1 GiB]
    #[arg(long, value_name = "UNITS", value_parser = clap::value_parser!(u64).range(1..), conflicts_with_all = ["whole", "here", "docker", "nerdctl", "podman"])]
    pub share: Option<u64>,
    /// Request whole GPUs (nvidia.com/gpu) instead of shares
    #[arg(long, conflicts_with_all = ["here", "docker", "nerdctl", "podman"])]
    pub whole: bool,
    /// Allocate GPU memory up to the limit of the share, and check that more is refused
    #[arg(long)]
    pub isolation: bool,
    /// Test all memory that is free, not 256 MiB; on a cluster, all of the share, or with --whole, of the GPU
    #[arg(long)]
    pub all_memory: bool,
    /// Use the tensor cores even if the GPU is shared; this loads the GPU fully for a moment
    #[arg(long)]
    pub tensor: bool,
    /// Only these steps, by id or name: S02,memory [default: all; divvy-smoke --help lists them]
    #[arg(long, value_name = "LIST")]
    pub steps: Option<String>,
    /// The limit on the time of each test, such as 90s or 2m
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = limit)]
    pub timeout: Duration,
    /// The largest number of pods at a time
    #[arg(long, value_name = "PODS", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub parallel: u16,
    /// The namespace of the pods; it is created if it does not exist, and then removed at the end
    #[arg(short, long, value_name = "NAME", default_value = "divvy-smoke", value_parser = object_name)]
    pub namespace: String,
    /// Run the test in this image, such as that of a training job; Divvy adds the program [default: the agent's image; for a container engine,
    /// divvy.dev/divvy of this version]
    #[arg(long, value_name = "IMAGE")]
    pub image: Option<String>,
    /// Take GPUs that compute wrongly out of service, and put those back that an earlier run took out and that pass now
    #[arg(long, conflicts_with_all = ["here", "docker", "nerdctl", "podman"])]
    pub report: bool,
    /// Leave the pods on the cluster, to look at them
    #[arg(long)]
    pub keep: bool,
    /// With a container engine: the CDI device
    #[arg(long, value_name = "DEVICE", conflicts_with_all = ["gpus", "runtime", "all_nodes", "nodes", "here"])]
    pub device: Option<String>,
    /// With a container engine: the value of its flag --gpus
    #[arg(long, value_name = "GPUS", conflicts_with_all = ["runtime", "all_nodes", "nodes", "here", "podman"])]
    pub gpus: Option<String>,
    /// With a container engine: the name of NVIDIA's container runtime
    #[arg(long, value_name = "NAME", conflicts_with_all = ["all_nodes", "nodes", "here"])]
    pub runtime: Option<String>,
    /// The divvy-smoke to run with --here [default: divvy-smoke in this program's directory]
    #[arg(long, value_name = "PATH", env = "DIVVY_SMOKE", hide_short_help = true)]
    pub program: Option<std::path::PathBuf>,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "table")]
    pub output: SmokeOutput,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy smoke`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SmokeOutput {
    /// A line for each GPU; with --here and in a container, a line for each step
    Table,
    /// JSON
    Json,
}

fn limit(text: &str) -> anyhow::Result<Duration> {
    let time = duration(text)?;
    let allowed = 1..=TEST_TIMEOUT.as_secs();
    ensure!(allowed.contains(&time.as_secs()), "write a time from 1s to 60m");
    Ok(time)
}
