//! The command-line grammar of `divvy configure`.

use std::path::PathBuf;

use anyhow::ensure;
use clap::{Args, ValueEnum};
use divvy_engines::Engine;

/// Add the runtime that gives containers GPUs to the configuration of Docker, containerd, or CRI-O, or remove it again
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy configure docker --cdi --dry-run
      show what would change, and change nothing
  divvy configure docker --cdi --restart
      docker run --runtime nvidia ..., docker run --device nvidia.com/gpu=0 ...
  divvy configure containerd --set-default --restart
      on a kubeadm node: start every pod's containers through divvy-runtime
  divvy configure k3s
      write k3s's drop-in or template; also rke2, k0s, microk8s, crio
  divvy configure --detect --dry-run
      show this machine's engines, and what would change for each
  divvy configure containerd --undo --restart  restore every file exactly
  divvy configure --runtime-class | kubectl apply -f -
      lets pods select the runtime: runtimeClassName: nvidia
  divvy configure containerd --root ./node-7 --engine-version 1.7
      on a copy of another machine's files

Comments, order, and keys that Divvy does not know stay as they are. If the engine reads a drop-in directory (containerd, CRI-O, k0s, newer k3s and rke2), the command writes a \
file there, and adds one `imports` line to the main file if none matches yet. Docker has no such directory. A second run changes nothing. The command keeps the previous \
content next to the engine's file, in FILE.divvy-undo, for --undo. If the file was edited since, --undo removes only Divvy's own settings.

SystemdCgroup comes from the kubelet's configuration if there is one, else from the runtime whose options are copied (the default runtime, runc, or crun). \
The engine must reload its files: the command prints how, and does it with --restart.

Exit status: 0 success, or nothing to do; 1 refused, and the files are unchanged.")]
pub struct ConfigureArgs {
    /// The engine to configure, or the distribution that brings its own engine
    #[arg(value_name = "ENGINE", value_parser = engine(), required_unless_present_any = ["detect", "runtime_class"])]
    pub engine: Option<Engine>,
    /// Configure all engines of this machine
    #[arg(long, conflicts_with_all = ["engine", "config", "drop_in"])]
    pub detect: bool,
    /// Root directory of the machine; any other directory than / is a copy of another machine's files
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// The engine's configuration file, below the root [default: the engine's or the distribution's own]
    #[arg(long, value_name = "FILE")]
    pub config: Option<String>,
    /// Write the runtime to this file, below the root; empty means the engine's own file [default: zz-divvy.toml in the drop-in directory]
    #[arg(long, value_name = "FILE")]
    pub drop_in: Option<String>,
    /// The name of the runtime, for `docker run --runtime` or a RuntimeClass
    #[arg(long, value_name = "NAME", default_value = "nvidia", value_parser = runtime_name)]
    pub runtime_name: String,
    /// The runtime's program [default: divvy-runtime in this program's directory, else /usr/local/bin/divvy-runtime]
    #[arg(long, value_name = "PATH", value_parser = runtime_path)]
    pub runtime_path: Option<String>,
    /// Make it the default runtime; =false removes it as the default [default: keep the current default]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub set_default: Option<bool>,
    /// Enable CDI in the engine itself (Docker 25 and later, containerd 1.7 and later) [default: keep the current setting]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cdi: Option<bool>,
    /// The kubelet's cgroup driver [default: from the kubelet's configuration, else from the runtime whose options are copied]
    #[arg(long, value_name = "DRIVER")]
    pub cgroup_driver: Option<CgroupDriver>,
    /// The version of containerd, such as 1.7 or 2.1, which decides how it merges files [default: detected; if unknown, the written files suit
    /// all versions]
    #[arg(long, value_name = "VERSION")]
    pub engine_version: Option<String>,
    /// Show the changes as a diff, and write nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Remove the runtime again
    #[arg(long, conflicts_with_all = ["set_default", "cdi", "cgroup_driver"])]
    pub undo: bool,
    /// Make the engine reload its files if they changed
    #[arg(long, conflicts_with = "dry_run")]
    pub restart: bool,
    /// Print the RuntimeClass for --runtime-name, and do nothing else
    #[arg(long, conflicts_with_all = ["engine", "detect", "undo", "restart", "dry_run"])]
    pub runtime_class: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: ConfigureOutput,
    /// Behave as nvidia-ctk: rewrite drop-ins each time, and switch off what is not requested
    #[arg(long, hide = true)]
    pub as_nvidia_ctk: bool,
    /// Copy options from the engine's dumped configuration (`containerd config dump`, `crio status config`) instead of its files
    #[arg(long, hide = true)]
    pub ask_engine: bool,
    /// The engine's program, which dumps the configuration
    #[arg(long, hide = true)]
    pub executable_path: Option<String>,
    /// Print an OCI hook that runs this program for all containers, and configure nothing
    #[arg(long, hide = true)]
    pub oci_hook: Option<String>,
    /// Write the OCI hook to this file
    #[arg(long, hide = true, requires = "oci_hook")]
    pub oci_hook_file: Option<PathBuf>,
    /// Print only errors
    #[arg(long, hide = true)]
    pub quiet: bool,
}

/// Cgroup drivers of the kubelet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CgroupDriver {
    /// systemd
    Systemd,
    /// cgroupfs
    Cgroupfs,
}

/// Output formats of `divvy configure`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConfigureOutput {
    /// Text for people
    Text,
    /// JSON
    Json,
}

fn engine() -> impl clap::builder::TypedValueParser<Value = Engine> {
    use clap::builder::TypedValueParser as _;
    clap::builder::PossibleValuesParser::new(Engine::ALL.map(Engine::as_str)).map(|name| {
        let engine = Engine::ALL.into_iter().find(|engine| engine.as_str() == name);
        engine.expect("one of the possible values")
    })
}

fn runtime_name(text: &str) -> anyhow::Result<String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    let is_name = !text.is_empty() && text.chars().all(allowed);
    ensure!(is_name, "a runtime's name consists of letters, digits, -, _ and .");
    Ok(text.to_owned())
}

fn runtime_path(text: &str) -> anyhow::Result<String> {
    let refused = |c: char| c.is_control() || "\"'\\".contains(c);
    let is_path = !text.is_empty() && !text.chars().any(refused);
    ensure!(is_path, "write the program's path, without quotes and backslashes");
    Ok(text.to_owned())
}
