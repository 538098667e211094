//! The command-line grammar of `divvy doctor`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::{Args, ValueEnum};

use super::AccessArgs;

/// Find what is wrong between the GPU driver and a running pod, why it matters, and what to type next
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy doctor
      check this machine: driver, device nodes, libraries, CDI specs, container
      engine, kubelet
  divvy doctor --cluster
      check the cluster: nodes, scheduler, extender, pods; --node --cluster
      checks both
  divvy doctor --smoke
      check this machine, then prove that a GPU computes, as divvy smoke does
  divvy doctor --only D05,C01  run only these checks
  divvy doctor --fix
      also make safe repairs: directories, links in /dev/char, CDI specs made
      for another driver
  divvy doctor --root ./tree
      check a copy of another machine's files (/proc, /sys, /dev, /etc, …)
  journalctl -u kubelet | divvy doctor --explain
      find the check for each error text, and what to type
  divvy doctor -o json | jq '.checks[] | select(.status == \"FAIL\")'

PASS  no problem.   NOTE  good to know.   WARN  something will fail, or is less safe than it seems.   FAIL  containers get no GPU, or a wrong one.
SKIP  the check could not run, for the printed reason; with --verbose also checks that do not apply here.

The command changes nothing without --fix, loads no driver library (divvy-probe does that), runs no container (except with --smoke), and works without a GPU. \
Run it as root: an ordinary user may not read everything that the checks need.

Exit status: 0 no problem (notes do not count); 1 a warning; 2 a failure, a check that could not run, a GPU that could not be tried, or wrong arguments.
With --explain: 0 the log has a known error; 1 it has none; 2 the log cannot be read.")]
pub struct DoctorArgs {
    /// Check this machine [default, unless --cluster is given]
    #[arg(long)]
    pub node: bool,
    /// Check the cluster, through the API server
    #[arg(long)]
    pub cluster: bool,
    #[command(flatten)]
    pub connection: AccessArgs,
    /// Run only the checks with these ids
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = id)]
    pub only: Vec<&'static str>,
    /// Root directory of the machine; any other directory than / is a copy of another machine's files, and no programs are run then
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// Root directory of the driver's files [default: /, or /run/nvidia/driver if only that contains them]
    #[arg(long, env = "NVIDIA_CTK_DRIVER_ROOT", value_name = "DIR")]
    pub driver_root: Option<String>,
    /// Make the repairs that need no decision, report them, and check again
    #[arg(long, conflicts_with = "explain")]
    pub fix: bool,
    /// Then prove that GPUs compute: run `divvy smoke --here`, or with --cluster `divvy smoke --all-nodes`
    #[arg(long, conflicts_with = "explain")]
    pub smoke: bool,
    /// How long to wait for each program, such as 3s or 1m
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = patience)]
    pub timeout: Duration,
    /// The divvy-probe to run [default: divvy-probe in this program's directory]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH")]
    pub probe: Option<PathBuf>,
    /// The driver's libnvidia-ml.so.1 [default: found by searching below the driver's root]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// The extender's address, such as http://127.0.0.1:32766 [default: the address in kube-scheduler's configuration on this machine;
    /// with --cluster the extender's pod, through the API server's proxy]
    #[arg(long, value_name = "URL")]
    pub extender: Option<String>,
    /// Check nothing; explain the error texts in a log, from standard input or a file
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with_all = ["node", "cluster", "only"])]
    pub explain: Option<PathBuf>,
    /// Also print the checks that do not apply here, with their reasons
    #[arg(short, long)]
    pub verbose: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: DoctorOutput,
}

/// Output formats of `divvy doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DoctorOutput {
    /// One line for each check
    Text,
    /// JSON
    Json,
}

fn patience(text: &str) -> anyhow::Result<Duration> {
    let time = divvy_program::values::duration(text)?;
    ensure!(
        !time.is_zero(),
        "no program answers within 0 s; write a longer time, such as 3s"
    );
    Ok(time)
}

fn id(text: &str) -> anyhow::Result<&'static str> {
    divvy_doctor::checks::by_id(text).map(|check| check.id).with_context(|| {
        let ids: Vec<&str> = divvy_doctor::checks::ALL.iter().map(|check| check.id).collect();
        format!("there is no check with this id; the ids are {}", ids.join(" "))
    })
}
