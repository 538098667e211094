//! The grammar of `divvy configure`.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use divvy_engines::Engine;

/// Tell Docker, containerd or CRI-O of the runtime that gives containers GPUs, and take that out again
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy configure docker --cdi --dry-run
      show what would change, and change nothing
  divvy configure docker --cdi --restart
      docker run --runtime nvidia ..., docker run --device nvidia.com/gpu=0 ...
  divvy configure containerd --set-default --restart
      a node of kubeadm: every pod's containers start through divvy-runtime
  divvy configure k3s
      its drop-in or its template; also rke2, k0s, microk8s, crio
  divvy configure --detect --dry-run
      which engines this machine has, and what each would be told
  divvy configure containerd --undo --restart  every file as it was, to the byte
  divvy configure --runtime-class | kubectl apply -f -
      by which pods ask for the runtime: runtimeClassName: nvidia
  divvy configure containerd --root ./node-7 --engine-version 1.7
                                               a copied machine

Comments, order and keys that Divvy does not know stay as they are. Where a folder of drop-ins is read (containerd, CRI-O, k0s, newer k3s and rke2) a \
file is put there, and the main file gets one `imports` line if none matches yet; Docker has no such folder. A second run changes nothing. What was there \
before is kept beside the engine's file, in FILE.divvy-undo, for --undo; a file that somebody has edited since loses what is ours alone.

SystemdCgroup is taken from the kubelet's configuration if there is one, else from the runtime whose options are copied (the default, runc, crun). \
The engine must read its files anew; what that takes is printed, and done with --restart.

Exit status: 0 as wished (or nothing to do), 1 refused: the files are as they were.")]
pub struct ConfigureArgs {
    /// Which engine, or the distribution that brings its own
    #[arg(value_name = "ENGINE", value_parser = engine(), required_unless_present_any = ["detect", "runtime_class"])]
    pub engine: Option<Engine>,
    /// All engines that are on this machine
    #[arg(long, conflicts_with_all = ["engine", "config", "drop_in"])]
    pub detect: bool,
    /// The machine's root: another one than / is a copy of another machine's files
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR", default_value = "/")]
    pub root: PathBuf,
    /// The engine's file, below the root [default: the engine's or the distribution's own]
    #[arg(long, value_name = "FILE")]
    pub config: Option<String>,
    /// Write the runtime into this file, below the root; empty: into the engine's own file [default: zz-divvy.toml in the folder of drop-ins]
    #[arg(long, value_name = "FILE")]
    pub drop_in: Option<String>,
    /// What the runtime is called: by `docker run --runtime`, by a RuntimeClass
    #[arg(long, value_name = "NAME", default_value = "nvidia", value_parser = runtime_name)]
    pub runtime_name: String,
    /// The runtime's program [default: the divvy-runtime beside this program, else /usr/local/bin/divvy-runtime]
    #[arg(long, value_name = "PATH", value_parser = runtime_path)]
    pub runtime_path: Option<String>,
    /// Make it the runtime of all who ask for none; =false: make it so no longer [default: leave that as it is]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub set_default: Option<bool>,
    /// Let the engine put CDI devices into containers itself (Docker from 25 on, containerd from 1.7 on) [default: leave that as it is]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub cdi: Option<bool>,
    /// The kubelet's cgroup driver [default: what the kubelet's configuration says, else as the runtime has it that is copied]
    #[arg(long, value_name = "DRIVER")]
    pub cgroup_driver: Option<CgroupDriver>,
    /// The version of containerd, such as 1.7 or 2.1, which says how it puts files together [default: asked; what suits all is written if it cannot be]
    #[arg(long, value_name = "VERSION")]
    pub engine_version: Option<String>,
    /// Show what would change as a diff, and change nothing
    #[arg(long)]
    pub dry_run: bool,
    /// Take the runtime out again
    #[arg(long, conflicts_with_all = ["set_default", "cdi", "cgroup_driver"])]
    pub undo: bool,
    /// Have the engine read its files anew, if they changed
    #[arg(long, conflicts_with = "dry_run")]
    pub restart: bool,
    /// Print the RuntimeClass for --runtime-name, and do nothing else
    #[arg(long, conflicts_with_all = ["engine", "detect", "undo", "restart", "dry_run"])]
    pub runtime_class: bool,
    /// The form
    #[arg(short, long, value_name = "FORMAT", default_value = "text")]
    pub output: ConfigureOutput,
    /// As nvidia-ctk does: drop-ins are written anew each time, and what is not asked for is switched off
    #[arg(long, hide = true)]
    pub as_nvidia_ctk: bool,
    /// Copy from what the engine says of itself (`containerd config dump`, `crio status config`) and not from its files
    #[arg(long, hide = true)]
    pub ask_engine: bool,
    /// The engine's program, that is asked
    #[arg(long, hide = true)]
    pub executable_path: Option<String>,
    /// Print a hook with this program for all containers, and configure nothing
    #[arg(long, hide = true)]
    pub oci_hook: Option<String>,
    /// Write it here
    #[arg(long, hide = true, requires = "oci_hook")]
    pub oci_hook_file: Option<PathBuf>,
    /// Say errors alone
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

/// Forms of what was done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ConfigureOutput {
    /// For people
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

fn runtime_name(text: &str) -> Result<String, String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    match !text.is_empty() && text.chars().all(allowed) {
        true => Ok(text.to_owned()),
        false => Err("a runtime's name is of letters, digits, -, _ and .".to_owned()),
    }
}

fn runtime_path(text: &str) -> Result<String, String> {
    if text.is_empty() || text.chars().any(|c| c.is_control() || "\"'\\".contains(c)) {
        return Err("write the program's path, without quotes and backslashes".to_owned());
    }
    Ok(text.to_owned())
}
