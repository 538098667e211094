//! The grammar of `divvy doctor`.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use super::AccessArgs;

/// Say what is wrong between the GPU driver and a running pod, why it matters, and what to type next
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy doctor
      this machine: driver, device nodes, libraries, CDI specs, container
      engine, kubelet
  divvy doctor --cluster
      the cluster: nodes, scheduler, extender, pods; --node --cluster looks at
      both
  divvy doctor --only D05,C01  these checks alone
  divvy doctor --fix
      also does what is safe: folders, links in /dev/char, CDI specs made for
      another driver
  divvy doctor --root ./tree
      a copy of another machine's files (/proc, /sys, /dev, /etc, /usr/lib, …)
  journalctl -u kubelet | divvy doctor --explain
      which check an error text belongs to, and what to type
  divvy doctor -o json | jq '.checks[] | select(.status == \"FAIL\")'

PASS  it holds.   NOTE  good to know.   WARN  something will fail, or is less safe than it seems.   FAIL  containers get no GPU, or a wrong one.
SKIP  it could not look, for the reason that is printed; with --verbose also: it does not apply here.

It changes nothing without --fix, loads nothing of the driver (divvy-probe does), runs no container, and needs no GPU to say that there is none. \
Run it as root: at what an ordinary user may not read it cannot look.

Exit status: 0 all is well (notes do not count), 1 a warning, 2 something fails, a check could not look, or the arguments are wrong.
With --explain: 0 it knows an error in the log, 1 it knows none, 2 the log cannot be read.")]
pub struct DoctorArgs {
    /// Look at this machine [default, unless --cluster is given]
    #[arg(long)]
    pub node: bool,
    /// Look at the cluster, through the API server
    #[arg(long)]
    pub cluster: bool,
    #[command(flatten)]
    pub connection: AccessArgs,
    /// The checks with these ids alone
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = id)]
    pub only: Vec<&'static str>,
    /// The machine's root: another one than / is a copy of another machine's files, and programs are not asked then
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// The root of the driver's files [default: / or, where only that has them, /run/nvidia/driver]
    #[arg(long, env = "NVIDIA_CTK_DRIVER_ROOT", value_name = "DIR")]
    pub driver_root: Option<String>,
    /// Put right what can be put right without a decision, say what was done, and look again
    #[arg(long, conflicts_with = "explain")]
    pub fix: bool,
    /// How long each program is waited for, such as 3s or 1m
    #[arg(long, value_name = "TIME", default_value = "3s", value_parser = patience)]
    pub timeout: Duration,
    /// The divvy-probe to run [default: the divvy-probe beside this program]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH")]
    pub probe: Option<PathBuf>,
    /// The driver's libnvidia-ml.so.1 [default: searched for below the driver's root]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// The extender's address, such as http://127.0.0.1:32766 [default: kube-scheduler's configuration on this machine says it, or with --cluster the
    /// API server passes the question on to the extender's pod]
    #[arg(long, value_name = "URL")]
    pub extender: Option<String>,
    /// Look at no machine: explain the error texts in a log, from standard input or a file
    #[arg(long, value_name = "FILE", num_args = 0..=1, default_missing_value = "-", conflicts_with_all = ["node", "cluster", "only"])]
    pub explain: Option<PathBuf>,
    /// Also print the checks that do not apply here, with the reasons
    #[arg(short, long)]
    pub verbose: bool,
    /// The form
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: DoctorOutput,
}

/// Forms of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DoctorOutput {
    /// A line for each check
    Text,
    /// JSON
    Json,
}

fn patience(text: &str) -> Result<Duration, String> {
    let time = divvy_agent::config::parse_duration(text)?;
    match time.is_zero() {
        true => Err("nobody answers in no time; 3s is usual".to_owned()),
        false => Ok(time),
    }
}

fn id(text: &str) -> Result<&'static str, String> {
    divvy_doctor::checks::by_id(text).map(|check| check.id).ok_or_else(|| {
        let ids: Vec<&str> = divvy_doctor::checks::ALL.iter().map(|check| check.id).collect();
        format!("there is no such check; there are {}", ids.join(" "))
    })
}
