//! The command-line grammar: every command, flag, and environment variable, with the text that `--help` prints for it.
//! [`crate::commands`] implements the commands.

pub mod cdi;
pub mod configure;
pub mod doctor;
pub mod labels;
mod nvidia_ctk;
pub mod output;
pub mod runtime_config;
pub mod simulate;
pub mod smi;
pub mod smoke;
pub mod system;
pub mod top;
pub mod uninstall;
pub mod web;

use std::path::PathBuf;

use crate::why::WhyTarget;
use anyhow::{Context as _, anyhow, bail};
use clap::{Args, Parser, Subcommand, ValueEnum};
#[cfg(feature = "completions")]
use clap_complete::ArgValueCompleter;
use divvy_kube::client::BearerToken;
use divvy_model::{MemoryUnit, MigProfile};
use divvy_policy::Policy;
use divvy_program::ContextArgs;
use divvy_program::values::{duration, namespaced, object_name};

#[cfg(feature = "completions")]
use crate::commands::completions::cluster as completions;
use crate::inspect::sort::SortBy;
use crate::printer::ColorMode;
use crate::scheduler_config::distribution::Distribution;
use crate::scheduler_config::second_scheduler::KubernetesVersion;
use crate::scheduler_config::second_scheduler::mutation::MutateWith;
use output::{OutputFormat, OutputParser};

/// Share GPUs between pods on Kubernetes
#[derive(Debug, Parser)]
#[command(
    name = "divvy",
    version,
    after_help = "\
Examples:
  divvy demo                       a cluster in one process, with simulated GPUs
  divvy inspect gpushare           how much of each GPU each pod uses
  divvy top                        what pods have of each GPU and what they use of it
  divvy why my-pod                 why a pod waits, or where it runs
  divvy audit
      find overcommitted GPUs, wrong allocations, and leaked memory
  divvy agent --node-name \"$NODE\"  on a GPU node (a DaemonSet does this)
  divvy extender --tls-secret divvy-system/divvy-extender-tls --listen 0.0.0.0:32766
  divvy scheduler-config           the configuration that kube-scheduler needs
  divvy simulate --help
      compare how many pods the same GPUs hold under each policy
  divvy doctor
      find problems on this machine, from the driver to the kubelet
  divvy smoke --all-nodes          prove that every GPU of the cluster computes
  divvy smi                        nvidia-smi's table, with the pods of the processes
  divvy labels                     node labels that describe this machine's GPUs
  divvy cdi generate
      a CDI spec of this machine's GPUs, for Docker, Podman, and containerd
  divvy configure docker --dry-run
      how Docker's configuration would change to use divvy-runtime

As a kubectl plugin: link this program into your PATH as kubectl-divvy and kubectl-inspect-gpushare. `divvy completions --help` shows how to set up tab completion."
)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: DivvyCommand,
    /// Level of the log on standard error: error, warn, info, debug, or trace; or a level per module, such as divvy_agent=debug
    #[arg(long, global = true, env = "DIVVY_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// Color the output: auto (on a terminal, unless NO_COLOR is set), always, or never
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        hide_possible_values = true
    )]
    pub color: ColorMode,
}

/// The commands of `divvy`.
#[derive(Debug, Subcommand)]
pub enum DivvyCommand {
    Agent(Box<divvy_agent::Args>),
    Extender(Box<divvy_extender::Args>),
    Explainer(divvy_explainer::Args),
    /// Show how much memory of each GPU each pod uses
    #[command(subcommand)]
    Inspect(InspectCommand),
    Top(Box<top::TopArgs>),
    Web(web::WebArgs),
    Why(WhyArgs),
    Audit(Box<AuditArgs>),
    SchedulerConfig(Box<SchedulerConfigArgs>),
    Uninstall(uninstall::UninstallArgs),
    /// Describe GPUs to container engines (CDI): generate specs, list devices, validate specs
    #[command(subcommand)]
    Cdi(cdi::CdiCommand),
    Configure(Box<configure::ConfigureArgs>),
    RuntimeConfig(runtime_config::RuntimeConfigArgs),
    Doctor(Box<doctor::DoctorArgs>),
    Smi(Box<smi::SmiArgs>),
    Smoke(Box<smoke::SmokeArgs>),
    /// Remove what a run of `divvy smoke` left when it was killed; the run itself starts this
    #[command(hide = true)]
    CleanUpAfterSmoke,
    /// Copy divvy-smoke and the libraries that it needs to a directory; the pods of `divvy smoke --image` do this
    #[command(hide = true)]
    CopySmokeTo {
        /// The directory, which must exist
        directory: std::path::PathBuf,
    },
    Labels(Box<labels::LabelsArgs>),
    /// Create NVIDIA's device nodes and the links to them, as `nvidia-ctk system` does
    #[command(subcommand, hide = true)]
    NvidiaSystem(system::SystemCommand),
    Simulate(Box<simulate::SimulateArgs>),
    Version(VersionArgs),
    Completions(CompletionsArgs),
    Demo(DemoArgs),
}

impl Cli {
    /// Return the filter of the log: that of `--log`, and by default none for the program's own. Of what the probe's client logs, `divvy smi` and `divvy top`
    /// tell everything themselves.
    pub fn log_filter(&self) -> Option<&str> {
        let without_probe = "warn,kube_client=off,kube_runtime=off,divvy=info,divvy_kube=info,divvy_hardware=off";
        let own = matches!(self.command, DivvyCommand::Smi(_) | DivvyCommand::Top(_)).then_some(without_probe);
        self.log.as_deref().or(own)
    }
}

/// kubectl's connection flags: the cluster and the user, for commands that people type.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Connection, as in kubectl")]
pub struct AccessArgs {
    #[command(flatten)]
    pub context: ContextArgs,
    /// The kubeconfig user to use instead of the context's user
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub user: Option<String>,
    /// The API server's address, instead of the one in the kubeconfig
    #[arg(short, long, value_name = "URL", value_parser = server, hide_short_help = true)]
    pub server: Option<http::Uri>,
    /// The bearer token to use instead of the kubeconfig's credentials
    #[arg(long, value_name = "TOKEN", hide_short_help = true)]
    pub token: Option<BearerToken>,
    /// Act as this user, such as jane or system:serviceaccount:NAMESPACE:NAME (requires permission to impersonate)
    #[arg(long = "as", value_name = "USER", hide_short_help = true)]
    pub impersonate: Option<String>,
    /// With --as: act as a member of this group (may be repeated)
    #[arg(long = "as-group", value_name = "GROUP", requires = "impersonate", hide_short_help = true)]
    pub impersonate_groups: Vec<String>,
    /// How long to wait for a response from the API server, such as 10s or 1m; 0 means no limit
    #[arg(long, value_name = "TIME", value_parser = request_timeout, hide_short_help = true)]
    pub request_timeout: Option<std::time::Duration>,
}

/// The flags of [`AccessArgs`] and kubectl's `--cluster`, for commands in which `--cluster` has no other meaning.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Connection, as in kubectl")]
pub struct ClusterArgs {
    #[command(flatten)]
    pub access: AccessArgs,
    /// The kubeconfig cluster to use instead of the context's cluster
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub cluster: Option<String>,
}

fn server(text: &str) -> anyhow::Result<http::Uri> {
    let address: http::Uri = text.parse().map_err(|error| anyhow!("{error}; write https://HOST:PORT"))?;
    match (address.scheme_str(), address.host()) {
        (Some("https" | "http"), Some(_)) => Ok(address),
        _ => bail!("not a server address; write https://HOST:PORT"),
    }
}

/// Parse a timeout as kubectl does: a Go duration (`10s`, `1m`) or a number of seconds.
fn request_timeout(text: &str) -> anyhow::Result<std::time::Duration> {
    let seconds = text.parse().ok().map(std::time::Duration::from_secs);
    let with_unit = || {
        text.parse::<jiff::SignedDuration>()
            .ok()
            .and_then(|time| time.try_into().ok())
    };
    seconds.or_else(with_unit).context("not a duration; write 10s, 1m, or 0")
}

/// The views of `divvy inspect`.
#[derive(Debug, Subcommand)]
pub enum InspectCommand {
    Gpushare(InspectArgs),
}

/// Show the GPU memory allocated to pods, per node and GPU, in units
#[derive(Debug, Args)]
#[command(
    version,
    display_name = "kubectl-inspect-gpushare",
    after_help = "\
Examples:
  kubectl inspect gpushare                 a line per node
  kubectl inspect gpushare -d              every pod
  kubectl inspect gpushare gpu-1 gpu-2     only these nodes
  kubectl inspect gpushare -o wide         a line per GPU, with model, health, and what enforces shares
  kubectl inspect gpushare --sort-by free  the fullest node first
  kubectl inspect gpushare -o json | jq '.nodes[].gpus[]'
  kubectl inspect gpushare -o jsonpath='{.nodes[*].name}'

PENDING counts the pods on a node whose annotations name no GPU."
)]
pub struct InspectArgs {
    /// Show only these nodes
    #[arg(value_name = "NODE")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::nodes)))]
    pub nodes: Vec<String>,
    /// Print a block per node, with a line per pod
    #[arg(short, long)]
    pub details: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_parser = OutputParser::<InspectOutput>::new())]
    pub output: Option<OutputFormat<InspectOutput>>,
    /// Print only the table's rows: no header, no totals
    #[arg(long, conflicts_with = "details")]
    pub no_headers: bool,
    /// Sort the nodes in ascending order: by name, allocated, free, total, or a path in a node's JSON such as `{.gpus[0].allocated}`
    #[arg(long, value_name = "COLUMN|PATH")]
    pub sort_by: Option<SortBy>,
    /// Print the output again when it changes, until Ctrl-C; the cluster is read every few seconds
    #[arg(short, long)]
    pub watch: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy inspect gpushare`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum InspectOutput {
    /// One line per GPU
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// Only the names of the nodes
    Name,
}

/// Explain why a pod waits for a GPU, or where it runs and what it holds
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy why                      every waiting pod of the context's namespace
  divvy why -A                   every waiting pod of all namespaces
  divvy why my-pod               one pod; also pod/my-pod, ml/my-pod
  kubectl divvy why deploy/train
      the pods of a workload (also sts, rs, ds, job)
  divvy why -l app=train         the pods with a label
  divvy why my-pod --all-nodes   why each node cannot take the pod
  divvy why my-pod --placement   which node and GPU the policy prefers
  divvy why my-pod -o json
  divvy why my-pod -w            print the answer again when it changes

`divvy why` prints a suggestion only if that single change would let the pod start: it tries each suggestion on a copy of the cluster's state.")]
pub struct WhyArgs {
    /// The pods or workloads to explain [default: every pod that waits for GPU memory]
    #[arg(value_name = "POD|KIND/NAME")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::pods)))]
    pub names: Vec<WhyTarget>,
    /// Explain the pods with these labels
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "names")]
    pub selector: Option<String>,
    /// The namespace of the pods [default: the context's]
    #[arg(short, long, value_name = "NAME")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::namespaces)))]
    pub namespace: Option<String>,
    /// Explain the pods of all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["namespace", "names", "selector"])]
    pub all_namespaces: bool,
    /// Explain for each node why it cannot take the pod, and show all its GPUs
    #[arg(long)]
    pub all_nodes: bool,
    /// Show how the policy ranks the nodes for this pod, the best first, as if the pod were not placed yet
    #[arg(long, requires = "names", conflicts_with = "all_nodes")]
    pub placement: bool,
    /// With --placement: the policy, which should be the extender's
    #[arg(long, value_name = "NAME", default_value = "divvy", requires = "placement", value_parser = Policy::for_scheduling)]
    pub policy: Policy,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_parser = OutputParser::<WhyOutput>::new())]
    pub output: Option<OutputFormat<WhyOutput>>,
    /// Print each answer again when it changes, until the pods are deleted or Ctrl-C
    #[arg(short, long, conflicts_with = "placement")]
    pub watch: bool,
    /// Size of one unit of aliyun.com/gpu-mem, for nodes whose agent does not publish it
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy why`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WhyOutput {
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// Only the names of the pods
    Name,
}

/// Print the versions of this program and of the cluster's extender and agents
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy version
  divvy version --client    without a request to the cluster
  divvy version -o json")]
pub struct VersionArgs {
    /// Print only the version of this program
    #[arg(long)]
    pub client: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<VersionOutput>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VersionOutput {
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// Check whether a GPU is overcommitted, an allocation is wrong, or memory leaked
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy audit  check the cluster as it is now
  divvy audit -o json | jq '.findings[] | select(.level == \"fault\")'

The audit looks for:
  GPUs with more memory allocated to bound, unfinished pods than they have,
    either only according to the annotations, or also while containers ran
  allocations of pods that are not bound, that cannot be read, or that name a
    GPU that the node does not have
  pods that request GPU memory and were bound without an allocation
  memory held for pods that are gone, and pods that still exist long after
    their grace period

Exit status: 0 no faults (notes do not count); 1 faults; 2 the audit is incomplete (a node is missing), there is no GPU memory to audit, or nothing could be read.")]
pub struct AuditArgs {
    /// How long memory may be held for a pod that is gone, and how long a pod may exist after its grace period, such as 30s or 5m
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = duration)]
    pub leak_after: std::time::Duration,
    /// Output format
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<AuditOutput>,
    /// Size of one unit of aliyun.com/gpu-mem, for nodes whose agent does not publish it
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Output formats of `divvy audit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AuditOutput {
    /// JSON
    Json,
}

/// Print kube-scheduler's configuration for the extender, merge it into an existing file, or check that it works
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy scheduler-config          the whole file for kube-scheduler --config
  divvy scheduler-config --from-cluster -o divvy.yaml
      with the address and the certificates of the installed extender
  divvy scheduler-config --for kubeadm
      where to put the file and what to restart (k3s, rke2, k0s, microk8s, kind)
  divvy scheduler-config --merge old.yaml -o new.yaml
      add the extender to a file of any version; the changes are listed on
      standard error
  divvy scheduler-config --merge - < old.yaml | diff old.yaml -
  divvy scheduler-config --from-cluster --as-second-scheduler | kubectl apply -f -
      for a closed control plane (EKS, GKE, AKS); includes the objects that
      assign pods to the second scheduler
  divvy scheduler-config --check  does the running scheduler call the extender?

The command changes nothing in the cluster, except that --check creates one pod. That pod is refused, never runs, and is deleted again, even after Ctrl-C.

Exit status of --check: 0 the scheduler calls the extender; 1 it does not: it bound a pod without calling the extender; \
2 the result is unknown, for the reason that is printed. Otherwise: 0 success; 1 failure, and nothing was written.")]
pub struct SchedulerConfigArgs {
    /// The extender's address, as the scheduler reaches it [default: http://127.0.0.1:32766/gpushare-scheduler; with --as-second-scheduler
    /// port 32766 of the Service divvy-extender in namespace divvy-system]
    #[arg(long, value_name = "URL")]
    pub extender_url: Option<String>,
    /// Also call the extender for whole MIG devices of these profiles, such as 1g.5gb,3g.20gb (nvidia.com/mig-1g.5gb, ...)
    #[arg(
        long = "mig-profile",
        value_name = "PROFILE",
        value_delimiter = ',',
        conflicts_with = "check"
    )]
    pub mig_profiles: Vec<MigProfile>,
    /// The scheduler's own kubeconfig, as a path that the scheduler sees [default: /etc/kubernetes/scheduler.conf, or the path for --for]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["as_second_scheduler", "check"])]
    pub kubeconfig_path: Option<String>,
    /// schedulerName of the profile [default: default-scheduler; with --as-second-scheduler divvy-scheduler; with --check the scheduler
    /// of a pod that names none]
    #[arg(long, value_name = "NAME", value_parser = object_name)]
    pub profile: Option<String>,
    /// Read address and certificates of the installed extender from the Service of this name and the Secret NAME-tls
    #[arg(long, value_name = "NAMESPACE/NAME", num_args = 0..=1, require_equals = true, default_missing_value = "divvy-system/divvy-extender",
        value_parser = namespaced, conflicts_with_all = ["extender_url", "tls_ca", "tls_cert", "tls_key", "tls_secret", "check"])]
    pub from_cluster: Option<(String, String)>,
    /// For an https address: the CA of the extender's certificate, as a path that the scheduler sees
    #[arg(long, value_name = "PATH", conflicts_with = "check")]
    pub tls_ca: Option<String>,
    /// The scheduler's own certificate, for an extender that requires client certificates
    #[arg(long, value_name = "PATH", conflicts_with = "check")]
    pub tls_cert: Option<String>,
    /// The private key for --tls-cert
    #[arg(long, value_name = "PATH", conflicts_with = "check")]
    pub tls_key: Option<String>,
    /// The name in the extender's certificate [default: the host of the address]
    #[arg(long, value_name = "NAME", conflicts_with = "check")]
    pub tls_server_name: Option<String>,
    /// With --as-second-scheduler and https: a Secret with ca.crt, tls.crt, and tls.key to mount into the scheduler. For a webhook,
    /// ca.crt is read from the Secret in the cluster
    #[arg(long, value_name = "SECRET", requires = "as_second_scheduler", value_parser = object_name)]
    pub tls_secret: Option<String>,
    /// Add Divvy's entry to this KubeSchedulerConfiguration (v1, v1beta3, v1beta2, or an old Policy); - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["distribution", "as_second_scheduler", "check"])]
    pub merge: Option<PathBuf>,
    /// Print step-by-step instructions for this distribution
    #[arg(long = "for", value_name = "DISTRIBUTION", conflicts_with_all = ["as_second_scheduler", "check"])]
    pub distribution: Option<Distribution>,
    /// Print manifests of a second kube-scheduler with its own name, for clusters with a closed control plane
    #[arg(long, conflicts_with = "check")]
    pub as_second_scheduler: bool,
    /// With --as-second-scheduler: what assigns it the pods that request GPU memory and name no scheduler [default: policy from
    /// Kubernetes 1.36 on, webhook for older versions]
    #[arg(long, value_name = "WHAT", requires = "as_second_scheduler")]
    pub mutate_with: Option<MutateWith>,
    /// With --as-second-scheduler: the cluster's version, such as 1.36.3 [default: the cluster's own version with --from-cluster, --kubeconfig,
    /// or --context, else 1.36.3]
    #[arg(long, value_name = "VERSION", requires = "as_second_scheduler")]
    pub kubernetes_version: Option<KubernetesVersion>,
    /// The namespace of the second scheduler, or of the pod that --check creates [default: kube-system; for --check the context's]
    #[arg(short, long, value_name = "NAME", value_parser = object_name)]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::namespaces)))]
    pub namespace: Option<String>,
    /// Check that the running scheduler calls the extender, by one pod that is refused and deleted
    #[arg(long)]
    pub check: bool,
    /// With --check: how long to wait for the scheduler, such as 30s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    pub timeout: std::time::Duration,
    /// Write to this file instead of standard output; may be the file given with --merge
    #[arg(short, long, value_name = "FILE", conflicts_with = "check")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Print the completion script of divvy for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  source <(divvy completions bash)  in ~/.bashrc
  source <(divvy completions zsh)   in ~/.zshrc, after compinit
  divvy completions fish > ~/.config/fish/completions/divvy.fish

Completion offers the names of pods, namespaces, and nodes of the cluster that the flags select.

For kubectl divvy and kubectl inspect gpushare, kubectl gets its completions from a second program next to the plugin. It is this program under another name:
  cd DIRECTORY-IN-PATH
  ln -s divvy kubectl-divvy
  ln -s divvy kubectl_complete-divvy
  ln -s divvy kubectl-inspect-gpushare
  ln -s divvy kubectl_complete-inspect-gpushare")]
pub struct CompletionsArgs {
    /// The shell to print the script for
    pub shell: Shell,
}

/// Shells that have a completion script.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// Bash
    Bash,
    /// Zsh
    Zsh,
    /// Fish
    Fish,
}

/// Run a cluster in one process with simulated GPUs, and play a scenario on it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy demo
      the tutorial: two pods on one GPU, then a day on a small cluster
  divvy demo --scenario tutorial    only the two pods
  divvy demo --list                 all scenarios, each with one line about it
  divvy demo --scenario isolation   programs allocate GPU memory, and the guard holds them to their shares
  divvy demo --scenario isolation --gpus real
      the same on the NVIDIA GPUs of this machine, which nothing else should use meanwhile
  divvy demo --scenario whole       whole NVIDIA GPUs and shares on one node
  divvy demo --scenario migration   two nodes move from nvidia-device-plugin to the agent, and one back
  divvy demo --keep                 keep the cluster up, to try kubectl on it
  divvy demo --nodes my-nodes.toml --keep
  divvy demo -o json | jq -r .text  print the text of every step

The demo needs no root, no network, and no GPU. The agents, the probes, and the extender are the real programs. The API server, the \
scheduler, the kubelets, the container runtime, and the NVML library are simulated. In the scenario isolation, containers run programs with the \
real guard on a simulated CUDA library, in mount namespaces that most machines allow every user. It needs files that \
`cargo xtask demo --scenario isolation` builds. With --gpus real, NVML and the CUDA library are the driver's; this has not been tried on a real GPU yet.

Exit status: 0 success; 1 if any step did not end as the scenario says.")]
pub struct DemoArgs {
    /// The scenario to play [default: tour; with --nodes, none]
    #[arg(long, value_name = "NAME")]
    pub scenario: Option<String>,
    /// List all scenarios
    #[arg(long, conflicts_with_all = ["scenario", "nodes", "keep", "output"])]
    pub list: bool,
    /// Simulate the nodes of this machine description (TOML)
    #[arg(long, value_name = "FILE")]
    pub nodes: Option<PathBuf>,
    /// Whose GPUs the scenario isolation uses
    #[arg(long, value_name = "WHOSE", value_enum, default_value_t, conflicts_with = "nodes")]
    pub gpus: DemoGpus,
    /// Directory of libcuda.so.1 and libnvidia-ml.so.1 for --gpus real [default: those that programs find]
    #[arg(long, value_name = "DIR")]
    pub driver: Option<PathBuf>,
    /// Keep the cluster up until Ctrl-C, and print how to reach it
    #[arg(long)]
    pub keep: bool,
    /// Output format
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<DemoOutput>,
    /// Do not pause between steps for reading
    #[arg(long)]
    pub fast: bool,
    /// Seed for everything that is random in a real cluster
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
}

/// The GPUs of `divvy demo`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum DemoGpus {
    /// Simulated ones
    #[default]
    Simulated,
    /// Those of this machine, through its NVIDIA driver; only with --scenario isolation
    Real,
}

/// Output formats of `divvy demo`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoOutput {
    /// One JSON object per line
    Json,
}

/// Return the arguments as clap should see them. The name under which the program was started decides: as a kubectl plugin, its arguments
/// belong to a subcommand; as `nvidia-ctk`, its arguments are translated from NVIDIA's flags.
///
/// # Errors
/// The program runs as `nvidia-ctk`, and the arguments are not valid for `nvidia-ctk` or request help.
pub fn arguments(given: impl IntoIterator<Item = std::ffi::OsString>) -> Result<Vec<std::ffi::OsString>, clap::Error> {
    let mut given: Vec<_> = given.into_iter().collect();
    let name = given
        .first()
        .map(PathBuf::from)
        .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()));
    match name.as_deref() {
        // The help prints the first argument as the program's name, so use what the user typed.
        Some("kubectl-inspect-gpushare" | "kubectl-inspect_gpushare") => {
            given.splice(0..1, ["kubectl".into(), "inspect".into(), "gpushare".into()]);
        }
        Some("kubectl-divvy") => given[0] = "kubectl divvy".into(),
        Some("nvidia-ctk") => return nvidia_ctk::translate(&given),
        _ => {}
    }
    Ok(given)
}

/// Return the arguments of `nvidia-ctk hook`, if the program was started as that.
pub fn hook_of_spec(given: &[std::ffi::OsString]) -> Option<Vec<std::ffi::OsString>> {
    given
        .first()
        .filter(|program| nvidia_ctk::is_meant(program))
        .and_then(|_| nvidia_ctk::hook(given))
}

/// Return the exit status for a command line that clap did not parse: 0 for help and version, else 2; as `nvidia-ctk`, the status of NVIDIA's tool.
pub fn usage_status(program: Option<&std::ffi::OsString>, error: &clap::Error) -> u8 {
    use clap::error::ErrorKind;
    match error.kind() {
        _ if !error.use_stderr() => 0,
        _ if !program.is_some_and(nvidia_ctk::is_meant) => 2,
        ErrorKind::InvalidSubcommand => 3,
        _ => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_is_true_to_go_is_true_to_nvidia_ctk() {
        for (flag, expected) in [("", true), ("=1", true), ("=T", true), ("=0", false), ("=FALSE", false)] {
            let flag = format!("--no-all-device{flag}");
            let ours = arguments(["nvidia-ctk", "cdi", "generate", &flag].map(Into::into)).expect(&flag);
            assert_eq!(ours.iter().any(|word| word == "--no-all-device"), expected, "{flag}");
        }
    }

    #[test]
    fn the_old_plugins_name_is_the_inspect_command() {
        let parsed =
            |arguments_given: &[&str]| Cli::try_parse_from(arguments(arguments_given.iter().map(Into::into)).expect("arguments"));
        for name in ["kubectl-inspect-gpushare", "/usr/local/bin/kubectl-inspect_gpushare"] {
            let Ok(Cli {
                command: DivvyCommand::Inspect(InspectCommand::Gpushare(args)),
                ..
            }) = parsed(&[name, "-d", "gpu-1"])
            else {
                panic!("{name} is not inspect");
            };
            assert!(args.details);
            assert_eq!(args.nodes, ["gpu-1"]);
        }
        assert!(matches!(
            parsed(&["kubectl-divvy", "why", "p"]),
            Ok(Cli {
                command: DivvyCommand::Why(_),
                ..
            })
        ));
    }
}
