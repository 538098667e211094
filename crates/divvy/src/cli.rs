//! The grammar: every command, flag and variable, and what `--help` says of them. What they do is in [`crate::commands`].

pub mod cdi;
pub mod configure;
pub mod doctor;
mod nvidia_ctk;
pub mod output;
pub mod runtime_config;
pub mod simulate;
pub mod system;
pub mod uninstall;

use std::net::SocketAddr;
use std::path::PathBuf;

use crate::why::Name;
use clap::{Args, Parser, Subcommand, ValueEnum};
#[cfg(feature = "completions")]
use clap_complete::ArgValueCompleter;
use divvy_kube::client::Token;
use divvy_model::{MemoryUnit, MiB};
use divvy_policy::Policy;

#[cfg(feature = "completions")]
use crate::commands::completions;
use crate::inspect::sort::SortBy;
use crate::scheduler_config::distribution::Distribution;
use crate::scheduler_config::second::Version;
use crate::scheduler_config::second::mutation::MutateWith;
use output::{Output, OutputParser};

/// Share GPUs between pods on Kubernetes
#[derive(Debug, Parser)]
#[command(
    name = "divvy",
    version,
    after_help = "\
Examples:
  divvy demo                       a cluster in one process, with simulated GPUs
  divvy inspect gpushare           who has how much of which GPU
  divvy why my-pod                 why a pod waits, or where it runs
  divvy audit
      was any GPU given twice, did a pod run elsewhere, did anything leak?
  divvy agent --node-name \"$NODE\"  on a GPU node (a DaemonSet does this)
  divvy extender --tls-secret divvy-system/divvy-extender-tls --listen 0.0.0.0:32766
  divvy scheduler-config           what kube-scheduler must be told
  divvy simulate --help
      how much more the same GPUs would hold under which policy
  divvy doctor
      what is wrong on this machine, from the driver to the kubelet
  divvy cdi generate
      what Docker, Podman and containerd must be told of this machine's GPUs
  divvy configure docker --dry-run
      what the engine must be told of the runtime that hands them out

As a kubectl plugin: link this program as kubectl-divvy and kubectl-inspect-gpushare into your PATH; `divvy completions --help` for tabs."
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
    /// What to log to standard error: error, warn, info, debug, trace, or per module as in divvy_agent=debug
    #[arg(long, global = true, env = "DIVVY_LOG", value_name = "FILTER")]
    pub log: Option<String>,
    /// Colours: on a terminal without NO_COLOR (auto), always, or never
    #[arg(
        long,
        global = true,
        value_name = "WHEN",
        default_value = "auto",
        hide_possible_values = true
    )]
    pub color: Color,
}

/// When there are colours.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Run on a GPU node: find its GPUs, advertise their memory, hand each container its own GPU (`divvy agent`, as a program of its own)
#[derive(Debug, Parser)]
#[command(name = "divvy-agent", version)]
pub struct AgentCli {
    /// What `divvy agent` takes.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// What to log to standard error: error, warn, info, debug, trace, or per module as in divvy_agent=debug
    #[arg(long, env = "DIVVY_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    Agent(Box<AgentArgs>),
    Extender(Box<ExtenderArgs>),
    Explainer(ExplainerArgs),
    /// Show who has how much of which GPU
    #[command(subcommand)]
    Inspect(InspectCommand),
    Why(WhyArgs),
    Audit(Box<AuditArgs>),
    SchedulerConfig(Box<SchedulerConfigArgs>),
    Manifests(ManifestsArgs),
    Uninstall(uninstall::UninstallArgs),
    /// Describe GPUs to container engines (CDI): make specs, list what is there, check it
    #[command(subcommand)]
    Cdi(cdi::CdiCommand),
    Configure(Box<configure::ConfigureArgs>),
    RuntimeConfig(runtime_config::RuntimeConfigArgs),
    Doctor(Box<doctor::DoctorArgs>),
    /// What `nvidia-ctk system` does
    #[command(subcommand, hide = true)]
    NvidiaSystem(system::SystemCommand),
    Simulate(Box<simulate::SimulateArgs>),
    Version(VersionArgs),
    Completions(CompletionsArgs),
    Demo(DemoArgs),
}

/// Which cluster, for a program that runs in it.
#[derive(Debug, Clone, Args)]
pub struct ContextArgs {
    /// The kubeconfig file; several paths as in KUBECONFIG [default: $KUBECONFIG, else ~/.kube/config, else the pod's own account]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The context of the kubeconfig to use
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
}

/// Which cluster, and as whom, for people: kubectl's flags.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Connection, as in kubectl")]
pub struct AccessArgs {
    #[command(flatten)]
    pub context: ContextArgs,
    /// The user of the kubeconfig, in place of the context's
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub user: Option<String>,
    /// The API server's address, in place of the kubeconfig's
    #[arg(short, long, value_name = "URL", value_parser = server, hide_short_help = true)]
    pub server: Option<http::Uri>,
    /// The bearer token, in place of the kubeconfig's credentials
    #[arg(long, value_name = "TOKEN", hide_short_help = true)]
    pub token: Option<Token>,
    /// Act as this user, such as jane or system:serviceaccount:NAMESPACE:NAME; needs the right to impersonate
    #[arg(long = "as", value_name = "USER", hide_short_help = true)]
    pub impersonate: Option<String>,
    /// With --as: act as a member of this group; can be given several times
    #[arg(long = "as-group", value_name = "GROUP", requires = "impersonate", hide_short_help = true)]
    pub impersonate_groups: Vec<String>,
    /// How long to wait for an answer of the API server, such as 10s or 1m; 0: without end
    #[arg(long, value_name = "TIME", value_parser = request_timeout, hide_short_help = true)]
    pub request_timeout: Option<std::time::Duration>,
}

/// The same, where the command has no other `--cluster`.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Connection, as in kubectl")]
pub struct ClusterArgs {
    #[command(flatten)]
    pub access: AccessArgs,
    /// The cluster of the kubeconfig, in place of the context's
    #[arg(long, value_name = "NAME", hide_short_help = true)]
    pub cluster: Option<String>,
}

fn server(text: &str) -> Result<http::Uri, String> {
    let address: http::Uri = text.parse().map_err(|error| format!("{error}; write https://HOST:PORT"))?;
    match (address.scheme_str(), address.host()) {
        (Some("https" | "http"), Some(_)) => Ok(address),
        _ => Err("it is no address of a server; write https://HOST:PORT".to_owned()),
    }
}

/// A Go duration, or seconds, as kubectl takes it.
fn request_timeout(text: &str) -> Result<std::time::Duration, String> {
    let seconds = text.parse().ok().map(std::time::Duration::from_secs);
    let with_unit = || {
        text.parse::<jiff::SignedDuration>()
            .ok()
            .and_then(|time| time.try_into().ok())
    };
    seconds
        .or_else(with_unit)
        .ok_or_else(|| "it is no duration; write 10s, 1m or 0".to_owned())
}

/// Run on a GPU node: find its GPUs, advertise their memory, hand each container its own GPU
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy agent --node-name gpu-1 --kubeconfig /etc/kubernetes/kubelet.conf
  divvy agent --node-name gpu-1 --memory-unit 256MiB --reserve-memory 512MiB
  NODE_NAME=gpu-1 divvy agent --probe unix:/run/divvy/probe.sock --metrics 0.0.0.0:9400

Resources offered to the kubelet:
  aliyun.com/gpu-mem  units of GPU memory (--memory-unit)
  aliyun.com/gpu-count
      the node's GPUs, for those who look at it; asking for it has no effect

The agent goes on whatever happens to the kubelet, the API server or the driver; /readyz (with --metrics) says for which part it waits, and the log says why.")]
pub struct AgentArgs {
    /// This node's name in the cluster
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// The kubelet's folder, with device-plugins/ in it [default: /var/lib/kubelet]
    #[arg(long, env = "DIVVY_KUBELET_DIR", value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// Where the container runtime looks for CDI specs [default: /var/run/cdi]
    #[arg(long, env = "DIVVY_CDI_DIR", value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
    /// Where grants are recorded; must survive a reboot [default: KUBELET_DIR/plugins/divvy.dev]
    #[arg(long, env = "DIVVY_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// The root under which /sys, /proc and /dev of the node lie [default: /]
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR")]
    pub sys_root: Option<PathBuf>,
    /// The divvy-probe to start, or unix:SOCKET of one that runs [default: the divvy-probe beside this program]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    pub probe: Option<String>,
    /// The driver's libnvidia-ml.so.1, for a probe that the agent starts [default: searched for]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// Where the driver is installed: /, or the root of a driver's container such as /run/nvidia/driver [default: /]
    #[arg(long, env = "DIVVY_DRIVER_ROOT", value_name = "DIR")]
    pub driver_root: Option<String>,
    /// What to do when no CDI spec of the loaded driver is there [default: auto]
    #[arg(long, env = "DIVVY_DRIVER_SPEC", value_name = "MODE")]
    pub driver_spec: Option<DriverSpec>,
    /// One unit of aliyun.com/gpu-mem: GiB, MiB, or a chunk such as 256MiB; the same on the extender [default: GiB]
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT")]
    pub memory_unit: Option<MemoryUnit>,
    /// Memory of each GPU that is not shared (a desktop runs on it too), such as 512MiB or 2GiB [default: 0]
    #[arg(long, env = "DIVVY_RESERVE_MEMORY", value_name = "AMOUNT")]
    pub reserve_memory: Option<MiB>,
    /// How a container gets its GPU [default: auto]
    #[arg(long, env = "DIVVY_DEVICE_LIST_STRATEGY", value_name = "STRATEGY")]
    pub device_list_strategy: Option<Strategy>,
    /// Serve /metrics, /healthz and /readyz here [default: not served]
    #[arg(long, env = "DIVVY_METRICS", value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// How long a failed GPU must be without a new error before it is offered again, such as 30s or 5m [default: 30s]
    #[arg(long, env = "DIVVY_HEALTH_RECOVERY", value_name = "TIME", value_parser = divvy_agent::config::parse_duration)]
    pub health_recovery: Option<std::time::Duration>,
    /// How often the driver is asked how its GPUs are; errors that it reports come at once [default: 5s]
    #[arg(long, env = "DIVVY_PROBE_INTERVAL", value_name = "TIME", value_parser = divvy_agent::config::parse_duration)]
    pub probe_interval: Option<std::time::Duration>,
    /// Read settings from this TOML file; flags and variables win over it
    #[arg(long, env = "DIVVY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// End when standard input is closed, so that nothing outlives whoever started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// How a container gets its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Strategy {
    /// The best that this node can do
    Auto,
    /// Through CDI (containerd 2.0 and later, CRI-O)
    Cdi,
    /// Through environment variables
    Envvar,
}

/// What to do when no CDI spec of the loaded driver is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DriverSpec {
    /// Make one in the CDI folder, where the driver's files can be read; else say so
    Auto,
    /// Say so
    Off,
}

/// Run beside kube-scheduler: decide on which node and GPU a pod goes
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy extender --kubeconfig ~/.kube/config --memory-unit MiB
  divvy extender --listen 0.0.0.0:32766 --tls-secret divvy-system/divvy-extender-tls
  divvy extender --tls-secret divvy-system/divvy-extender-tls --leader-elect \\
      --listen 0.0.0.0:32766 --advertise-address 10.0.0.3
  divvy extender --listen 0.0.0.0:32766 --tls-cert-file tls.crt \\
      --tls-private-key-file tls.key --client-ca-file ca.crt

Without --tls-… it speaks plain HTTP, and everyone who can connect to it can bind pods. It listens on the loopback address then, and starts on another \
address only with --insecure. With --tls-secret it makes a certificate authority, its own certificate and one for kube-scheduler, keeps them in that Secret (which must be there, empty at \
first), and renews its own by itself. With files it reads them again when they change. In both cases filter, bind and inspect are answered only to \
clients with a certificate of that authority and a name of --client-name; /healthz, /readyz and /metrics to everybody.

Policies (--policy), by which it ranks nodes and chooses GPUs:
  divvy     what leaves the most room for the pods that usually come; learnt
            from those that came
  best-fit  the node and the GPU with the least left that is enough, as gpushare
            within a node
  spread    the emptiest GPU of the emptiest node: no sharing while it can be
            avoided
  fgd, rf, gpu-packing, gpu-clustering, dot-prod, random
            from the literature, to compare with

With --decide-in prioritize (the default) kube-scheduler adds its own scores; with filter the extender lets the best node through alone, for \
schedulers whose configuration has no prioritizeVerb, and preferences of pods for nodes count for nothing.

With --leader-elect several of them can run: one holds a Lease and binds, the others filter and hand binds on to it. Without, there must be one only.

kube-scheduler reaches it through its configuration (KubeSchedulerConfiguration, extenders):
  urlPrefix: https://ADDR:PORT/gpushare-scheduler
  filterVerb: filter
  prioritizeVerb: prioritize
  weight: 25
  preemptVerb: preempt
  bindVerb: bind
  nodeCacheCapable: true
  ignorable: false
  managedResources:
  - {name: aliyun.com/gpu-mem, ignoredByScheduler: false}
  - {name: aliyun.com/gpu-count, ignoredByScheduler: false}
`divvy scheduler-config` prints the whole file, and where it goes.")]
pub struct ExtenderArgs {
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// Where to listen
    #[arg(long, env = "DIVVY_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:32766")]
    pub listen: SocketAddr,
    /// One unit of aliyun.com/gpu-mem: GiB, MiB, or a chunk such as 256MiB; the same on every agent
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    /// By what the node and the GPU of a pod are chosen
    #[arg(long, env = "DIVVY_POLICY", value_name = "NAME", default_value = "divvy")]
    pub policy: Policy,
    /// Who has the last word on the node: prioritize (kube-scheduler, by the extender's scores) or filter (the extender)
    #[arg(long, env = "DIVVY_DECIDE_IN", value_name = "VERB", default_value = "prioritize")]
    pub decide_in: Decide,
    /// Read gpushare's ConfigMaps kube-system/unhealthy-gpu-NODE, and give no pod a GPU that they list
    #[arg(long, env = "DIVVY_UNHEALTHY_GPU_CONFIGMAPS", value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub unhealthy_gpu_configmaps: bool,
    /// Answer the API server's webhook, POST /mutate/SCHEDULER, which gives pods to a second scheduler; needs TLS
    #[arg(long, env = "DIVVY_WEBHOOK", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub webhook: bool,
    /// Allow plain HTTP on an address that other machines can reach: everyone who can connect can bind pods
    #[arg(long)]
    pub insecure: bool,
    #[command(flatten)]
    pub tls: ExtenderTls,
    #[command(flatten)]
    pub replicas: ExtenderReplicas,
    /// End when standard input is closed, so that nothing outlives whoever started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Run in the cluster: answer `divvy why` for users who may not list nodes and pods
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy explainer --listen 0.0.0.0:32767
  divvy explainer --listen 0.0.0.0:32767 --configmap kube-public/divvy

`divvy why` needs the right to list nodes and pods. For users without it, it asks this program, through the API server's service proxy. The program lists \
nodes and pods with its own rights, and answers a user who may get the pod in question (TokenReview and SubjectAccessReview). It names no pod that the user may not list.

Users find it by the ConfigMap (--configmap). Its `service` is NAMESPACE/SERVICE:PORT of this program; the program adds `tls.crt`, the certificate by which `divvy why` \
recognises it. It makes that certificate at its start, so run one replica. `divvy manifests` has all the objects; explainer.enabled=false leaves them out.")]
pub struct ExplainerArgs {
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// Where to listen
    #[arg(long, env = "DIVVY_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:32767")]
    pub listen: SocketAddr,
    /// One unit of aliyun.com/gpu-mem, for clusters whose agents publish none
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    /// The ConfigMap by which users find this program
    #[arg(long, env = "DIVVY_EXPLAINER_CONFIGMAP", value_name = "NAMESPACE/NAME", default_value = "kube-public/divvy", value_parser = namespaced)]
    pub configmap: (String, String),
    /// End when standard input is closed, so that nothing outlives the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Who chooses the node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Decide {
    /// kube-scheduler, by the extender's scores and its own
    Prioritize,
    /// The extender: one node fits
    Filter,
}

/// How the extender gets its certificates.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
pub struct ExtenderTls {
    /// Make the certificates, and keep them in this Secret
    #[arg(long, env = "DIVVY_TLS_SECRET", value_name = "NAMESPACE/NAME", value_parser = namespaced)]
    pub tls_secret: Option<(String, String)>,
    /// Or take these: the extender's certificate, then those between it and its authority, in PEM
    #[arg(long, env = "DIVVY_TLS_CERT_FILE", value_name = "FILE", conflicts_with = "tls_secret", requires_all = ["tls_private_key_file", "client_ca_file"])]
    pub tls_cert_file: Option<PathBuf>,
    /// The key of --tls-cert-file
    #[arg(
        long,
        env = "DIVVY_TLS_PRIVATE_KEY_FILE",
        value_name = "FILE",
        conflicts_with = "tls_secret",
        requires = "tls_cert_file"
    )]
    pub tls_private_key_file: Option<PathBuf>,
    /// Who signs the certificates of clients
    #[arg(
        long,
        env = "DIVVY_CLIENT_CA_FILE",
        value_name = "FILE",
        conflicts_with = "tls_secret",
        requires = "tls_cert_file"
    )]
    pub client_ca_file: Option<PathBuf>,
    /// A name that kube-scheduler's certificate may have, as common name or alternative name; can be given several times [default: kube-scheduler].
    /// Other replicas are recognised by --tls-server-name
    #[arg(
        long,
        env = "DIVVY_CLIENT_NAME",
        value_name = "NAME",
        value_delimiter = ',',
        requires = "client_ca_file"
    )]
    pub client_name: Vec<String>,
    /// The name in the extender's certificate, serverName in kube-scheduler's tlsConfig [default: divvy-extender.NAMESPACE.svc, with the
    /// namespace of --tls-secret, else divvy-system]
    #[arg(long, env = "DIVVY_TLS_SERVER_NAME", value_name = "NAME")]
    pub tls_server_name: Option<String>,
    /// With --tls-secret: how long a certificate of the extender is valid; it is renewed when a third of that is left
    #[arg(long, env = "DIVVY_TLS_LIFETIME", value_name = "TIME", default_value = "30d", value_parser = lifetime)]
    pub tls_lifetime: std::time::Duration,
}

/// Several replicas, of which one binds.
#[derive(Debug, Args)]
#[command(next_help_heading = "Several replicas")]
pub struct ExtenderReplicas {
    /// Bind only while holding a Lease; another replica filters, and hands binds on to the one that holds it
    #[arg(long, env = "DIVVY_LEADER_ELECT", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// The Lease
    #[arg(long, env = "DIVVY_LEASE", value_name = "NAMESPACE/NAME", default_value = "divvy-system/divvy-extender", value_parser = namespaced)]
    pub lease: (String, String),
    /// How long the others wait for a leader that is not heard of; it stops by itself after two thirds of that
    #[arg(long, env = "DIVVY_LEASE_DURATION", value_name = "TIME", default_value = "15s", value_parser = divvy_agent::config::parse_duration)]
    pub lease_duration: std::time::Duration,
    /// Where the other replicas reach this one [default: the address of --listen, unless that is 0.0.0.0 or ::]
    #[arg(long, env = "DIVVY_ADVERTISE_ADDRESS", value_name = "ADDR")]
    pub advertise_address: Option<std::net::IpAddr>,
    /// What people know this replica by, its pod's name [default: the machine's name]
    #[arg(long, env = "DIVVY_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
}

/// `NAMESPACE/NAME`
fn namespaced(text: &str) -> Result<(String, String), String> {
    let (namespace, name) = text
        .split_once('/')
        .ok_or("write NAMESPACE/NAME, such as divvy-system/divvy-extender-tls")?;
    Ok((object_name(namespace)?, object_name(name)?))
}

/// A duration, in days, too.
fn lifetime(text: &str) -> Result<std::time::Duration, String> {
    const SHORTEST: std::time::Duration = std::time::Duration::from_secs(6);
    let time = match text.strip_suffix('d').map(str::parse::<u32>) {
        Some(Ok(days)) => std::time::Duration::from_secs(u64::from(days) * 86_400),
        _ => divvy_agent::config::parse_duration(text)?,
    };
    if time < SHORTEST {
        return Err(format!(
            "a certificate that is valid for less than {} s is renewed all the time",
            SHORTEST.as_secs()
        ));
    }
    Ok(time)
}

/// What to inspect.
#[derive(Debug, Subcommand)]
pub enum InspectCommand {
    Gpushare(InspectArgs),
}

/// Show GPU memory given to pods, per node and GPU, in units
#[derive(Debug, Args)]
#[command(
    version,
    display_name = "kubectl-inspect-gpushare",
    after_help = "\
Examples:
  kubectl inspect gpushare                 a line per node
  kubectl inspect gpushare -d              every pod
  kubectl inspect gpushare gpu-1 gpu-2     these nodes
  kubectl inspect gpushare -o wide         a line per GPU, with model and health
  kubectl inspect gpushare --sort-by free  the fullest node first
  kubectl inspect gpushare -o json | jq '.nodes[].gpus[]'
  kubectl inspect gpushare -o jsonpath='{.nodes[*].name}'

PENDING are pods on a node whose annotations name no GPU."
)]
pub struct InspectArgs {
    /// Only these nodes
    #[arg(value_name = "NODE")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::nodes)))]
    pub nodes: Vec<String>,
    /// A block per node, a line per pod
    #[arg(short, long)]
    pub details: bool,
    /// Another form
    #[arg(short, long, value_name = "FORMAT", value_parser = OutputParser::<InspectOutput>::new())]
    pub output: Option<Output<InspectOutput>>,
    /// Print the table's rows alone: no header, no sums
    #[arg(long, conflicts_with = "details")]
    pub no_headers: bool,
    /// Sort the nodes, the smallest first: by name, allocated, free, total, or a path of a node in -o json such as `{.gpus[0].allocated}`
    #[arg(long, value_name = "COLUMN|PATH")]
    pub sort_by: Option<SortBy>,
    /// Print it anew when it changes, until Ctrl-C; it is looked at every few seconds
    #[arg(short, long)]
    pub watch: bool,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Forms of `inspect`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum InspectOutput {
    /// A line per GPU
    Wide,
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// The nodes' names
    Name,
}

/// Explain why a pod waits for a GPU, or where it runs and what it holds
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy why                      every pod of the context's namespace that waits
  divvy why -A                   of all namespaces
  divvy why my-pod               also pod/my-pod, ml/my-pod
  kubectl divvy why deploy/train
                                 its pods (also sts, rs, ds, job)
  divvy why -l app=train
  divvy why my-pod --all-nodes   what each node says
  divvy why my-pod --placement   which node and GPU the policy prefers for it
  divvy why my-pod -o json
  divvy why my-pod -w            again when the answer changes

A suggestion is printed only if that change alone would let the pod start: each one was tried on what was read of the cluster.")]
pub struct WhyArgs {
    /// Pods or workloads [default: every pod that waits for GPU memory]
    #[arg(value_name = "POD|KIND/NAME")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::pods)))]
    pub names: Vec<Name>,
    /// The pods with these labels
    #[arg(short = 'l', long, value_name = "LABELS", conflicts_with = "names")]
    pub selector: Option<String>,
    /// Their namespace [default: the context's]
    #[arg(short, long, value_name = "NAME")]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::namespaces)))]
    pub namespace: Option<String>,
    /// Look in all namespaces
    #[arg(short = 'A', long, conflicts_with_all = ["namespace", "names", "selector"])]
    pub all_namespaces: bool,
    /// Say of each node what keeps the pod from it, and show all its GPUs
    #[arg(long)]
    pub all_nodes: bool,
    /// Say what the policy thinks of each node for this pod, as if it were not placed yet: the best one and those after it
    #[arg(long, requires = "names", conflicts_with = "all_nodes")]
    pub placement: bool,
    /// With --placement: the policy, as the extender was given it
    #[arg(long, value_name = "NAME", default_value = "divvy", requires = "placement")]
    pub policy: Policy,
    /// Another form
    #[arg(short, long, value_name = "FORMAT", value_parser = OutputParser::<WhyOutput>::new())]
    pub output: Option<Output<WhyOutput>>,
    /// Print each answer anew when it changes, until the pods are deleted or Ctrl-C
    #[arg(short, long, conflicts_with = "placement")]
    pub watch: bool,
    /// One unit of aliyun.com/gpu-mem, for nodes whose agent publishes none
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Forms of `why`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum WhyOutput {
    /// JSON
    Json,
    /// YAML
    Yaml,
    /// The pods' names
    Name,
}

/// Say which version this program is, and which the cluster's extender and agents are
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy version
  divvy version --client    without asking the cluster
  divvy version -o json")]
pub struct VersionArgs {
    /// Only this program
    #[arg(long)]
    pub client: bool,
    /// Another form
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<VersionOutput>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Forms of `version`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum VersionOutput {
    /// JSON
    Json,
    /// YAML
    Yaml,
}

/// Say whether any GPU was ever given more than it has, any pod ran elsewhere than allocated, anything leaked
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  divvy audit                 the cluster as it is now
  divvy audit record day.log  write down what happens, until Ctrl-C
  divvy audit day.log         replay it
  divvy audit day.log --reports containers.jsonl
      and hold what the containers said of themselves against it
  kubectl get pods,nodes -A -o json | divvy audit -
  kubectl get pods -A -w -o json --output-watch-events > pods.json; divvy audit nodes.json pods.json
  divvy audit day.log -o json | jq '.findings[] | select(.level == \"fault\")'

What is looked for, after each change:
  more allocated on a GPU than it has, by pods that are bound and have not
    ended, on paper or with containers that ran
  allocations that changed after the binding, that nobody bound, that cannot be
    read, that name a GPU that the node has not or that failed
  pods that ask for GPU memory and were bound without an allocation
  memory held for pods that are gone, deletions that are late
  with --reports: containers on another GPU than allocated, told another size,
    without void; more in use on a GPU than it has

A line of --reports, one when a container begins and one (\"running\":false) when it has ended:
  {\"at\":1767323046.5,\"node\":\"n1\",\"pod_uid\":\"…\",\"container\":\"main\",\"id\":\"…\",\"running\":true,\"gpus\":[0],\"env\":{\"ALIYUN_COM_GPU_MEM_IDX\":\"0\"}}
  gpus: minor numbers of /dev/nvidia*, or UUIDs; without it the variables
    decide.

Exit status: 0 sound; 1 findings; 2 it cannot be told for all of it (a gap in the history, a node that is not in it), there is no GPU memory to look at, or \
nothing could be read."
)]
pub struct AuditArgs {
    #[command(subcommand)]
    pub command: Option<AuditCommand>,
    /// Watch logs of `divvy audit record`, or pods and nodes as kubectl prints them in JSON; - is standard input [default: the cluster, now]
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// What containers said of themselves, as JSON lines
    #[arg(long, value_name = "FILE")]
    pub reports: Vec<PathBuf>,
    /// How long memory may be held for a pod that is gone, and a deletion may be late, such as 30s or 5m
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = divvy_agent::config::parse_duration)]
    pub leak_after: std::time::Duration,
    /// Another form
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<AuditOutput>,
    /// One unit of aliyun.com/gpu-mem, for nodes whose agent publishes none
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// What else `audit` does.
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    Record(AuditRecordArgs),
}

/// Write down what happens to pods and nodes, for `divvy audit` to replay
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy audit record day.log  until Ctrl-C or SIGTERM; then: divvy audit day.log
  divvy audit record day.log --for 10m
                              goes on with a file that is there
  divvy audit record - | gzip > day.log.gz

JSON lines: a watch log with only what an audit reads (no environment, no labels). It takes the right to list and watch pods and nodes. \
Killed at any moment it leaves a readable file. Where the watch could not go on, the log says so, and the audit says what it did not see.")]
pub struct AuditRecordArgs {
    /// Where to; - is standard output
    pub file: PathBuf,
    /// End after this time, such as 10m
    #[arg(long, value_name = "TIME", value_parser = divvy_agent::config::parse_duration)]
    pub r#for: Option<std::time::Duration>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Forms of `audit`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum AuditOutput {
    /// JSON
    Json,
}

/// Tell kube-scheduler of the extender: print its configuration, merge it into an existing one, or check that it works
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy scheduler-config          the whole file for kube-scheduler --config
  divvy scheduler-config --from-cluster -o divvy.yaml
      address and certificates of the extender that is installed
  divvy scheduler-config --for kubeadm
      where it goes and what to restart (k3s, rke2, k0s, microk8s, kind)
  divvy scheduler-config --merge old.yaml -o new.yaml
      into an existing one of any version; what changed is said on standard
      error
  divvy scheduler-config --merge - < old.yaml | diff old.yaml -
  divvy scheduler-config --from-cluster --as-second-scheduler | kubectl apply -f -
      for a closed control plane (EKS, GKE, AKS), with what gives it the pods
  divvy scheduler-config --check  does the running scheduler call the extender?

Nothing is changed in the cluster, but for the one pod of --check, which is refused, never runs, and is deleted again, on Ctrl-C too.

Exit status of --check: 0 the scheduler calls the extender; 1 it does not, proven by a pod that it bound without asking; \
2 it could not be told in time, or not at all: the text says why. Otherwise: 0 printed; 1 not, and nothing was written.")]
pub struct SchedulerConfigArgs {
    /// The extender, as the scheduler reaches it [default: port 32766 of 127.0.0.1, /gpushare-scheduler; with --as-second-scheduler that
    /// port of the Service divvy-extender in namespace divvy-system]
    #[arg(long, value_name = "URL")]
    pub extender_url: Option<String>,
    /// The kubeconfig that the scheduler itself uses, a path on its side [default: /etc/kubernetes/scheduler.conf, or that of --for]
    #[arg(long, value_name = "PATH", conflicts_with_all = ["as_second_scheduler", "check"])]
    pub kubeconfig_path: Option<String>,
    /// schedulerName of the profile [default: default-scheduler; with --as-second-scheduler divvy-scheduler; with --check what a pod
    /// gets that names none]
    #[arg(long, value_name = "NAME", value_parser = object_name)]
    pub profile: Option<String>,
    /// Take address and certificates from the extender that is installed: the Service of this name, and the Secret NAME-tls
    #[arg(long, value_name = "NAMESPACE/NAME", num_args = 0..=1, require_equals = true, default_missing_value = "divvy-system/divvy-extender",
        value_parser = namespaced, conflicts_with_all = ["extender_url", "tls_ca", "tls_cert", "tls_key", "tls_secret", "check"])]
    pub from_cluster: Option<(String, String)>,
    /// For an https address: who signed the extender's certificate, a path on the scheduler's side
    #[arg(long, value_name = "PATH", conflicts_with = "check")]
    pub tls_ca: Option<String>,
    /// The scheduler's own certificate, for an extender that asks for one
    #[arg(long, value_name = "PATH", conflicts_with = "check")]
    pub tls_cert: Option<String>,
    /// The key of --tls-cert
    #[arg(long, value_name = "PATH", conflicts_with = "check")]
    pub tls_key: Option<String>,
    /// The name in the extender's certificate [default: the host of the address]
    #[arg(long, value_name = "NAME", conflicts_with = "check")]
    pub tls_server_name: Option<String>,
    /// With --as-second-scheduler and https: a Secret with ca.crt, tls.crt and tls.key, mounted into the scheduler; for a webhook its ca.crt is
    /// read from the cluster
    #[arg(long, value_name = "SECRET", requires = "as_second_scheduler", value_parser = object_name)]
    pub tls_secret: Option<String>,
    /// Put Divvy's entry into this KubeSchedulerConfiguration (v1, v1beta1 to 3, v1alpha1, or an old Policy); - is standard input
    #[arg(long, value_name = "FILE", conflicts_with_all = ["distribution", "as_second_scheduler", "check"])]
    pub merge: Option<PathBuf>,
    /// Print what to do on this distribution, step by step
    #[arg(long = "for", value_name = "DISTRIBUTION", conflicts_with_all = ["as_second_scheduler", "check"])]
    pub distribution: Option<Distribution>,
    /// Print manifests of a kube-scheduler under its own name, for clusters whose control plane is closed
    #[arg(long, conflicts_with = "check")]
    pub as_second_scheduler: bool,
    /// With --as-second-scheduler: what gives it the pods that want a GPU and name no scheduler [default: policy from Kubernetes 1.36 on,
    /// webhook below]
    #[arg(long, value_name = "WHAT", requires = "as_second_scheduler")]
    pub mutate_with: Option<MutateWith>,
    /// With --as-second-scheduler: the cluster's version, such as 1.36.3 [default: asked of the cluster with --from-cluster, --kubeconfig or
    /// --context, else 1.36.3]
    #[arg(long, value_name = "VERSION", requires = "as_second_scheduler")]
    pub kubernetes_version: Option<Version>,
    /// The namespace of the second scheduler, or of the pod of --check [default: kube-system; for --check the context's]
    #[arg(short, long, value_name = "NAME", value_parser = object_name)]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::namespaces)))]
    pub namespace: Option<String>,
    /// Prove, with one pod that is refused and deleted, that the running scheduler calls the extender
    #[arg(long)]
    pub check: bool,
    /// With --check: how long to wait for the scheduler, such as 30s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = divvy_agent::config::parse_duration)]
    pub timeout: std::time::Duration,
    /// Write to this file rather than to standard output; it may be the one that is merged
    #[arg(short, long, value_name = "FILE", conflicts_with = "check")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// What the API server takes as a name (RFC 1123): it goes into manifests and commands.
fn object_name(text: &str) -> Result<String, String> {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let inside = text
        .bytes()
        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.');
    if text.len() <= 253 && inside && edge(text.chars().next()) && edge(text.chars().last()) {
        Ok(text.to_owned())
    } else {
        Err("a name is of lower-case letters, digits, - and ., and begins and ends with a letter or digit".to_owned())
    }
}

/// Print the completions of divvy for a shell
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  source <(divvy completions bash)  in ~/.bashrc
  source <(divvy completions zsh)   in ~/.zshrc, after compinit
  divvy completions fish > ~/.config/fish/completions/divvy.fish

Names of pods, namespaces and nodes are asked of the cluster that the flags name.

For kubectl divvy and kubectl inspect gpushare it is kubectl that asks: a program beside the plugin, which is this one under another name.
  cd DIRECTORY-IN-PATH
  ln -s divvy kubectl-divvy
  ln -s divvy kubectl_complete-divvy
  ln -s divvy kubectl-inspect-gpushare
  ln -s divvy kubectl_complete-inspect-gpushare")]
pub struct CompletionsArgs {
    /// The shell
    pub shell: Shell,
}

/// Shells with completions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Shell {
    /// Bash
    Bash,
    /// Zsh
    Zsh,
    /// Fish
    Fish,
}

/// Print the objects that install Divvy into a cluster: its Helm chart, rendered without Helm
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kubectl create namespace divvy-system
  divvy manifests | kubectl apply -f -
  divvy manifests --set memoryUnit=256MiB,agent.reserveMemory=512MiB > divvy.yaml
  divvy manifests --values my-values.yaml --set image.repository=registry.example/divvy
  divvy manifests --set extender.loopback=true --set 'extender.nodeSelector.node-role\\.kubernetes\\.io/control-plane='
  divvy manifests --show-values  what can be chosen, with comments

Objects go to standard output, what is left to do and to look at to standard error. The objects are, \
byte for byte, those of `helm template` for the same chart and values.")]
pub struct ManifestsArgs {
    /// Choose values: KEY=VALUE, several with commas; may be given several times
    #[arg(long, value_name = "KEY=VALUE")]
    pub set: Vec<String>,
    /// Choose values in a YAML file; may be given several times, --set wins
    #[arg(short = 'f', long, value_name = "FILE")]
    pub values: Vec<PathBuf>,
    /// The namespace of agents and extender
    #[arg(short, long, value_name = "NAME", default_value = "divvy-system")]
    pub namespace: String,
    /// The beginning of the objects' names
    #[arg(long, value_name = "NAME", default_value = "divvy")]
    pub name: String,
    /// Print what can be chosen, and what holds when nothing is
    #[arg(long, conflicts_with_all = ["set", "values", "namespace", "name"])]
    pub show_values: bool,
}

/// Run a cluster in one process with simulated GPUs, and play a scenario on it
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy demo
      the tutorial: two pods on one card, then a day on a small cluster
  divvy demo --scenario tutorial    only the two pods
  divvy demo --keep                 leave the cluster up and try kubectl on it
  divvy demo --nodes my-nodes.toml --keep
  divvy demo -o json | jq -r .text  every step as a line of JSON

Needs no root, no network and no GPU. The agents, probes and the extender are the real programs; the API server, the \
scheduler, the kubelets, the container runtime and the NVML library are simulators.

The exit status is 1 if any step did not come out as the scenario says.")]
pub struct DemoArgs {
    /// What to play: tutorial or tour [default: tour; with --nodes, nothing]
    #[arg(long, value_name = "NAME")]
    pub scenario: Option<String>,
    /// Other machines: a machine description in TOML
    #[arg(long, value_name = "FILE")]
    pub nodes: Option<PathBuf>,
    /// Leave the cluster up until Ctrl-C, and say how to reach it
    #[arg(long)]
    pub keep: bool,
    /// Another form
    #[arg(short, long, value_name = "FORMAT")]
    pub output: Option<DemoOutput>,
    /// Do not wait between steps for a person to read along
    #[arg(long)]
    pub fast: bool,
    /// Seed of everything that a real cluster leaves to chance
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub seed: u64,
}

/// Forms of the demo's story.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DemoOutput {
    /// A JSON object per line
    Json,
}

/// The arguments as clap should see them: a program that is linked under a kubectl plugin's name starts in the
/// middle of the grammar, and one under the name of NVIDIA's tool has that one's flags.
///
/// # Errors
/// NVIDIA's tool was called as it cannot be, or asked for help.
pub fn arguments(given: impl IntoIterator<Item = std::ffi::OsString>) -> Result<Vec<std::ffi::OsString>, clap::Error> {
    let mut given: Vec<_> = given.into_iter().collect();
    let name = given
        .first()
        .map(PathBuf::from)
        .and_then(|path| path.file_name().map(|name| name.to_string_lossy().into_owned()));
    match name.as_deref() {
        // What stands first is what the help calls the program: as it is typed.
        Some("kubectl-inspect-gpushare" | "kubectl-inspect_gpushare") => {
            given.splice(0..1, ["kubectl".into(), "inspect".into(), "gpushare".into()]);
        }
        Some("kubectl-divvy") => given[0] = "kubectl divvy".into(),
        Some("nvidia-ctk") => return nvidia_ctk::translate(&given),
        _ => {}
    }
    Ok(given)
}

/// What `nvidia-ctk hook` is called with, if it is.
pub fn hook_of_spec(given: &[std::ffi::OsString]) -> Option<Vec<std::ffi::OsString>> {
    given
        .first()
        .filter(|program| nvidia_ctk::is_meant(program))
        .and_then(|_| nvidia_ctk::hook(given))
}

/// The exit status for words that are none of ours: 2, and under the name of NVIDIA's tool what that one has.
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
                command: Command::Inspect(InspectCommand::Gpushare(args)),
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
                command: Command::Why(_),
                ..
            })
        ));
    }
}
