//! The command-line grammar: every command, flag, and environment variable, with the text that `--help` prints for it.
//! [`crate::commands`] implements the commands.

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
use divvy_cluster::client::Token;
use divvy_model::{MemoryUnit, MiB};
use divvy_placement::policy::Policy;

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
  divvy inspect gpushare           how much of each GPU each pod uses
  divvy why my-pod                 why a pod waits, or where it runs
  divvy audit
      find overcommitted GPUs, pods on the wrong GPU, and leaked memory
  divvy agent --node-name \"$NODE\"  on a GPU node (a DaemonSet does this)
  divvy extender --tls-secret divvy-system/divvy-extender-tls --listen 0.0.0.0:32766
  divvy scheduler-config           the configuration that kube-scheduler needs
  divvy simulate --help
      compare how many pods the same GPUs hold under each policy
  divvy doctor
      find problems on this machine, from the driver to the kubelet
  divvy cdi generate
      a CDI spec of this machine's GPUs, for Docker, Podman, and containerd
  divvy configure docker --dry-run
      how Docker's configuration would change to use divvy-runtime

As a kubectl plugin: link this program into your PATH as kubectl-divvy and kubectl-inspect-gpushare. `divvy completions --help` shows how to set up tab completion."
)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
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
    pub color: Color,
}

/// When to color the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Run on a GPU node: find its GPUs, advertise their memory, and give each container its GPU (`divvy agent` as a separate program)
#[derive(Debug, Parser)]
#[command(name = "divvy-agent", version)]
pub struct AgentCli {
    /// The arguments of `divvy agent`.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Level of the log on standard error: error, warn, info, debug, or trace; or a level per module, such as divvy_agent=debug
    #[arg(long, env = "DIVVY_LOG", value_name = "FILTER")]
    pub log: Option<String>,
}

/// The commands of `divvy`.
#[derive(Debug, Subcommand)]
pub enum Command {
    Agent(Box<AgentArgs>),
    Extender(Box<ExtenderArgs>),
    Explainer(ExplainerArgs),
    /// Show how much memory of each GPU each pod uses
    #[command(subcommand)]
    Inspect(InspectCommand),
    Why(WhyArgs),
    Audit(Box<AuditArgs>),
    SchedulerConfig(Box<SchedulerConfigArgs>),
    Manifests(ManifestsArgs),
    Uninstall(uninstall::UninstallArgs),
    /// Describe GPUs to container engines (CDI): generate specs, list devices, validate specs
    #[command(subcommand)]
    Cdi(cdi::CdiCommand),
    Configure(Box<configure::ConfigureArgs>),
    RuntimeConfig(runtime_config::RuntimeConfigArgs),
    Doctor(Box<doctor::DoctorArgs>),
    /// Create NVIDIA's device nodes and the links to them, as `nvidia-ctk system` does
    #[command(subcommand, hide = true)]
    NvidiaSystem(system::SystemCommand),
    Simulate(Box<simulate::SimulateArgs>),
    Version(VersionArgs),
    Completions(CompletionsArgs),
    Demo(DemoArgs),
}

/// The flags that select the cluster, for a program that runs inside a cluster.
#[derive(Debug, Clone, Args)]
pub struct ContextArgs {
    /// The kubeconfig file, or several separated by colons [default: $KUBECONFIG, else ~/.kube/config, else the pod's service account]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,
    /// The kubeconfig context to use
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
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
    pub token: Option<Token>,
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

fn server(text: &str) -> Result<http::Uri, String> {
    let address: http::Uri = text.parse().map_err(|error| format!("{error}; write https://HOST:PORT"))?;
    match (address.scheme_str(), address.host()) {
        (Some("https" | "http"), Some(_)) => Ok(address),
        _ => Err("not a server address; write https://HOST:PORT".to_owned()),
    }
}

/// Parse a timeout as kubectl does: a Go duration (`10s`, `1m`) or a number of seconds.
fn request_timeout(text: &str) -> Result<std::time::Duration, String> {
    let seconds = text.parse().ok().map(std::time::Duration::from_secs);
    let with_unit = || {
        text.parse::<jiff::SignedDuration>()
            .ok()
            .and_then(|time| time.try_into().ok())
    };
    seconds
        .or_else(with_unit)
        .ok_or_else(|| "not a duration; write 10s, 1m, or 0".to_owned())
}

/// Run on a GPU node: find its GPUs, advertise their memory, and give each container its GPU
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy agent --node-name gpu-1 --kubeconfig /etc/kubernetes/kubelet.conf
  divvy agent --node-name gpu-1 --memory-unit 256MiB --reserve-memory 512MiB
  NODE_NAME=gpu-1 divvy agent --probe unix:/run/divvy/probe.sock --metrics 0.0.0.0:9400

Resources advertised to the kubelet:
  aliyun.com/gpu-mem  units of GPU memory (--memory-unit)
  aliyun.com/gpu-count
      the node's number of GPUs, for information; requesting it has no effect

The agent keeps running when the kubelet, the API server, or the driver fails. /readyz (with --metrics) names the part that the agent waits for, and the log says why.")]
pub struct AgentArgs {
    /// The name of this node in the cluster
    #[arg(long, env = "NODE_NAME", value_name = "NAME")]
    pub node_name: Option<String>,
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// The kubelet's directory, which contains device-plugins/ [default: /var/lib/kubelet]
    #[arg(long, env = "DIVVY_KUBELET_DIR", value_name = "DIR")]
    pub kubelet_dir: Option<PathBuf>,
    /// Directory in which the container runtime looks for CDI specs [default: /var/run/cdi]
    #[arg(long, env = "DIVVY_CDI_DIR", value_name = "DIR")]
    pub cdi_dir: Option<PathBuf>,
    /// Directory for the records of grants; must survive a reboot [default: KUBELET_DIR/plugins/divvy.dev]
    #[arg(long, env = "DIVVY_STATE_DIR", value_name = "DIR")]
    pub state_dir: Option<PathBuf>,
    /// Root directory of the node's /sys, /proc, and /dev [default: /]
    #[arg(long, env = "DIVVY_SYS_ROOT", value_name = "DIR")]
    pub sys_root: Option<PathBuf>,
    /// The divvy-probe to start, or unix:SOCKET of a running one [default: divvy-probe in this program's directory]
    #[arg(long, env = "DIVVY_PROBE", value_name = "PATH|unix:SOCKET")]
    pub probe: Option<String>,
    /// The driver's libnvidia-ml.so.1, for a probe that the agent starts [default: found by searching]
    #[arg(long, env = "DIVVY_NVML_LIBRARY", value_name = "PATH")]
    pub nvml_library: Option<PathBuf>,
    /// Root directory of the driver's installation, such as / or /run/nvidia/driver (a driver container) [default: /]
    #[arg(long, env = "DIVVY_DRIVER_ROOT", value_name = "DIR")]
    pub driver_root: Option<String>,
    /// What to do if no CDI spec of the loaded driver exists [default: auto]
    #[arg(long, env = "DIVVY_DRIVER_SPEC", value_name = "MODE")]
    pub driver_spec: Option<DriverSpec>,
    /// Size of one unit of aliyun.com/gpu-mem: GiB, MiB, or a size such as 256MiB; must match the extender's [default: GiB]
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT")]
    pub memory_unit: Option<MemoryUnit>,
    /// Memory of each GPU to keep back, such as 512MiB or 2GiB, for example for a desktop on the same GPU [default: 0]
    #[arg(long, env = "DIVVY_RESERVE_MEMORY", value_name = "AMOUNT")]
    pub reserve_memory: Option<MiB>,
    /// How to put the GPU into the container [default: auto]
    #[arg(long, env = "DIVVY_DEVICE_LIST_STRATEGY", value_name = "STRATEGY")]
    pub device_list_strategy: Option<Strategy>,
    /// Serve /metrics, /healthz, and /readyz on this address [default: not served]
    #[arg(long, env = "DIVVY_METRICS", value_name = "ADDR:PORT")]
    pub metrics: Option<SocketAddr>,
    /// How long a failed GPU must run without a new error before it is advertised again, such as 30s or 5m [default: 30s]
    #[arg(long, env = "DIVVY_HEALTH_RECOVERY", value_name = "TIME", value_parser = divvy_agent::config::parse_duration)]
    pub health_recovery: Option<std::time::Duration>,
    /// How often to query the driver for the state of the GPUs; the driver's error events arrive immediately [default: 5s]
    #[arg(long, env = "DIVVY_PROBE_INTERVAL", value_name = "TIME", value_parser = divvy_agent::config::parse_duration)]
    pub probe_interval: Option<std::time::Duration>,
    /// Read settings from this TOML file; flags and environment variables take precedence
    #[arg(long, env = "DIVVY_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// End when standard input is closed, so that the agent does not outlive the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// How a container gets its GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Strategy {
    /// CDI; advertise nothing if the container runtime is known to lack CDI
    Auto,
    /// CDI, even if the container runtime looks too old (containerd 2.0 and later and CRI-O have CDI)
    Cdi,
    /// Environment variables (not supported by this version)
    Envvar,
}

/// What the agent does if no CDI spec of the loaded driver exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DriverSpec {
    /// Generate one in the CDI directory if the driver's files are readable, else only report it
    Auto,
    /// Only report it
    Off,
}

/// Run alongside kube-scheduler: choose the node and the GPU of each pod
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy extender --kubeconfig ~/.kube/config --memory-unit MiB
  divvy extender --listen 0.0.0.0:32766 --tls-secret divvy-system/divvy-extender-tls
  divvy extender --tls-secret divvy-system/divvy-extender-tls --leader-elect \\
      --listen 0.0.0.0:32766 --advertise-address 10.0.0.3
  divvy extender --listen 0.0.0.0:32766 --tls-cert-file tls.crt \\
      --tls-private-key-file tls.key --client-ca-file ca.crt

Without --tls-… the extender speaks plain HTTP, and every client that can connect to it can bind pods. It then listens on the loopback address, and accepts another \
address only with --insecure. With --tls-secret it creates a certificate authority (CA), its own certificate, and one for kube-scheduler. It keeps them in that Secret (which must exist and may be \
empty), and renews its own certificate automatically. With certificate files it reads the files again when they change. In both cases it answers filter, bind, and inspect only to \
clients whose certificate is signed by that CA and has a name from --client-name. It answers /healthz, /readyz, and /metrics to every client.

Policies (--policy), which rank nodes and choose GPUs:
  divvy     keep the most room for the pods that usually arrive, as learned
            from earlier arrivals
  best-fit  the node and the GPU with the least free memory that is enough; as
            gpushare does within a node
  spread    the emptiest GPU of the emptiest node: share GPUs only when it is
            unavoidable
  fgd, rf, gpu-packing, gpu-clustering, dot-prod, random
            policies from the literature, for comparison

With --decide-in prioritize (the default) kube-scheduler adds its own scores. With filter the extender lets only the best node pass. This suits \
schedulers whose configuration has no prioritizeVerb, but pods' preferences for nodes are then ignored.

With --leader-elect several replicas can run: one holds a Lease and binds pods; the others filter, and forward bind requests to it. Without it, run exactly one replica.

kube-scheduler calls the extender as its configuration says (KubeSchedulerConfiguration, extenders):
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
`divvy scheduler-config` prints the whole file; with --for it also says where to put it.")]
pub struct ExtenderArgs {
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// The address and port to listen on
    #[arg(long, env = "DIVVY_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:32766")]
    pub listen: SocketAddr,
    /// Size of one unit of aliyun.com/gpu-mem: GiB, MiB, or a size such as 256MiB; must match every agent's
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    /// The policy that chooses the node and the GPU of a pod
    #[arg(long, env = "DIVVY_POLICY", value_name = "NAME", default_value = "divvy")]
    pub policy: Policy,
    /// Where the node is chosen: prioritize (kube-scheduler chooses, with the extender's scores) or filter (the extender chooses)
    #[arg(long, env = "DIVVY_DECIDE_IN", value_name = "VERB", default_value = "prioritize")]
    pub decide_in: Decide,
    /// Read gpushare's ConfigMaps kube-system/unhealthy-gpu-NODE, and never allocate a GPU that they list
    #[arg(long, env = "DIVVY_UNHEALTHY_GPU_CONFIGMAPS", value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set)]
    pub unhealthy_gpu_configmaps: bool,
    /// Serve the admission webhook POST /mutate/SCHEDULER, which assigns pods to a second scheduler; requires TLS
    #[arg(long, env = "DIVVY_WEBHOOK", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub webhook: bool,
    /// Allow plain HTTP on an address that other machines can reach: every client that can connect can bind pods
    #[arg(long)]
    pub insecure: bool,
    #[command(flatten)]
    pub tls: ExtenderTls,
    #[command(flatten)]
    pub replicas: ExtenderReplicas,
    /// End when standard input is closed, so that the extender does not outlive the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Run in the cluster: answer `divvy why` for users who may not list nodes and pods
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy explainer --listen 0.0.0.0:32767
  divvy explainer --listen 0.0.0.0:32767 --configmap kube-public/divvy

`divvy why` requires permission to list nodes and pods. For a user without that permission it calls this program, through the API server's service proxy. The program lists \
nodes and pods with its own permissions, and answers a user who may get the pod in question (TokenReview and SubjectAccessReview). It names no pod that the user may not list.

`divvy why` finds this program through the ConfigMap (--configmap). The key `service` of the ConfigMap is NAMESPACE/SERVICE:PORT of this program. The program adds `tls.crt`, the certificate by which `divvy why` \
recognizes it. The program creates that certificate when it starts, so run one replica. The Helm chart contains all the objects; explainer.enabled=false omits them.")]
pub struct ExplainerArgs {
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// The address and port to listen on
    #[arg(long, env = "DIVVY_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:32767")]
    pub listen: SocketAddr,
    /// Size of one unit of aliyun.com/gpu-mem, for clusters whose agents do not publish it
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    /// The ConfigMap through which `divvy why` finds this program
    #[arg(long, env = "DIVVY_EXPLAINER_CONFIGMAP", value_name = "NAMESPACE/NAME", default_value = "kube-public/divvy", value_parser = namespaced)]
    pub configmap: (String, String),
    /// End when standard input is closed, so that the explainer does not outlive the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// Which program chooses the node of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Decide {
    /// kube-scheduler chooses, from the extender's scores and its own
    Prioritize,
    /// The extender chooses: it reports that only one node fits
    Filter,
}

/// The flags for the extender's certificates.
#[derive(Debug, Args)]
#[command(next_help_heading = "TLS")]
pub struct ExtenderTls {
    /// Create the certificates, and keep them in this Secret
    #[arg(long, env = "DIVVY_TLS_SECRET", value_name = "NAMESPACE/NAME", value_parser = namespaced)]
    pub tls_secret: Option<(String, String)>,
    /// Read the extender's certificate from this PEM file, followed by any intermediate certificates
    #[arg(long, env = "DIVVY_TLS_CERT_FILE", value_name = "FILE", conflicts_with = "tls_secret", requires_all = ["tls_private_key_file", "client_ca_file"])]
    pub tls_cert_file: Option<PathBuf>,
    /// The private key for --tls-cert-file
    #[arg(
        long,
        env = "DIVVY_TLS_PRIVATE_KEY_FILE",
        value_name = "FILE",
        conflicts_with = "tls_secret",
        requires = "tls_cert_file"
    )]
    pub tls_private_key_file: Option<PathBuf>,
    /// The CA that signs the clients' certificates
    #[arg(
        long,
        env = "DIVVY_CLIENT_CA_FILE",
        value_name = "FILE",
        conflicts_with = "tls_secret",
        requires = "tls_cert_file"
    )]
    pub client_ca_file: Option<PathBuf>,
    /// A common name or alternative name that kube-scheduler's certificate may have; may be repeated [default: kube-scheduler].
    /// The extender recognizes its other replicas by --tls-server-name
    #[arg(
        long,
        env = "DIVVY_CLIENT_NAME",
        value_name = "NAME",
        value_delimiter = ',',
        requires = "client_ca_file"
    )]
    pub client_name: Vec<String>,
    /// The name in the extender's certificate (serverName in kube-scheduler's tlsConfig) [default: divvy-extender.NAMESPACE.svc, with the
    /// namespace from --tls-secret, else divvy-system]
    #[arg(long, env = "DIVVY_TLS_SERVER_NAME", value_name = "NAME")]
    pub tls_server_name: Option<String>,
    /// With --tls-secret: how long the extender's certificate is valid; it is renewed when a third of that time is left
    #[arg(long, env = "DIVVY_TLS_LIFETIME", value_name = "TIME", default_value = "30d", value_parser = lifetime)]
    pub tls_lifetime: std::time::Duration,
}

/// The flags for several replicas of the extender, of which only the leader binds pods.
#[derive(Debug, Args)]
#[command(next_help_heading = "Several replicas")]
pub struct ExtenderReplicas {
    /// Bind pods only while holding a Lease; the other replicas filter, and forward bind requests to the Lease's holder
    #[arg(long, env = "DIVVY_LEADER_ELECT", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// The Lease to use for leader election
    #[arg(long, env = "DIVVY_LEASE", value_name = "NAMESPACE/NAME", default_value = "divvy-system/divvy-extender", value_parser = namespaced)]
    pub lease: (String, String),
    /// How long the followers wait for a silent leader; the leader itself stops binding after two thirds of that time without renewal
    #[arg(long, env = "DIVVY_LEASE_DURATION", value_name = "TIME", default_value = "15s", value_parser = divvy_agent::config::parse_duration)]
    pub lease_duration: std::time::Duration,
    /// The address at which the other replicas reach this one [default: the address of --listen, unless that is 0.0.0.0 or ::]
    #[arg(long, env = "DIVVY_ADVERTISE_ADDRESS", value_name = "ADDR")]
    pub advertise_address: Option<std::net::IpAddr>,
    /// The name of this replica in the Lease and in logs, usually its pod's name [default: the host name]
    #[arg(long, env = "DIVVY_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
}

/// Parse `NAMESPACE/NAME`, and refuse a part that the API server would refuse as a name.
fn namespaced(text: &str) -> Result<(String, String), String> {
    let (namespace, name) = text
        .split_once('/')
        .ok_or("write NAMESPACE/NAME, such as divvy-system/divvy-extender-tls")?;
    Ok((object_name(namespace)?, object_name(name)?))
}

/// Parse how long a certificate is valid: a duration, or a number of days such as `30d`.
fn lifetime(text: &str) -> Result<std::time::Duration, String> {
    const SHORTEST: std::time::Duration = std::time::Duration::from_secs(6);
    let time = match text.strip_suffix('d').map(str::parse::<u32>) {
        Some(Ok(days)) => std::time::Duration::from_secs(u64::from(days) * 86_400),
        _ => divvy_agent::config::parse_duration(text)?,
    };
    if time < SHORTEST {
        return Err(format!(
            "a certificate that is valid for less than {} s would be renewed all the time; write a longer time, such as 30d",
            SHORTEST.as_secs()
        ));
    }
    Ok(time)
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
  kubectl inspect gpushare -o wide         a line per GPU, with model and health
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
    pub output: Option<Output<InspectOutput>>,
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
    pub names: Vec<Name>,
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
    #[arg(long, value_name = "NAME", default_value = "divvy", requires = "placement")]
    pub policy: Policy,
    /// Output format
    #[arg(short, long, value_name = "FORMAT", value_parser = OutputParser::<WhyOutput>::new())]
    pub output: Option<Output<WhyOutput>>,
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

/// Check whether a GPU was ever overcommitted, a pod ran on another GPU than its own, or memory leaked
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "\
Examples:
  divvy audit                 audit the current state of the cluster
  divvy audit record day.log  record the changes, until Ctrl-C
  divvy audit day.log         audit the recorded changes
  divvy audit day.log --reports containers.jsonl
      also compare them with the containers' own reports
  kubectl get pods,nodes -A -o json | divvy audit -
  kubectl get pods -A -w -o json --output-watch-events > pods.json; divvy audit nodes.json pods.json
  divvy audit day.log -o json | jq '.findings[] | select(.level == \"fault\")'

After each change the audit looks for:
  GPUs with more memory allocated to bound, unfinished pods than they have,
    by the annotations alone or with containers that really ran
  allocations that changed after the binding, that were not bound, that cannot
    be read, or that name a GPU that the node does not have or that failed
  pods that request GPU memory and were bound without an allocation
  memory held for pods that are gone, and late deletions
  with --reports: containers on another GPU than allocated, with a wrong
    amount of memory in their variables, or without NVIDIA_VISIBLE_DEVICES=void;
    GPUs with more memory in use than they have

Each line of --reports describes a container when it starts, and again (\"running\":false) when it has ended:
  {\"at\":1767323046.5,\"node\":\"n1\",\"pod_uid\":\"…\",\"container\":\"main\",\"id\":\"…\",\"running\":true,\"gpus\":[0],\"env\":{\"ALIYUN_COM_GPU_MEM_IDX\":\"0\"}}
  gpus: minor numbers of /dev/nvidia*, or UUIDs; without gpus the environment
    variables decide.

Exit status: 0 no faults (notes do not count); 1 faults; 2 the audit is incomplete (a gap in the history, a node missing from it), there is no GPU memory to audit, or \
nothing could be read."
)]
pub struct AuditArgs {
    #[command(subcommand)]
    pub command: Option<AuditCommand>,
    /// Logs of `divvy audit record`, or kubectl's JSON of pods and nodes; - is standard input [default: the current cluster]
    #[arg(value_name = "FILE")]
    pub files: Vec<PathBuf>,
    /// Reports of the containers about themselves, as JSON lines
    #[arg(long, value_name = "FILE")]
    pub reports: Vec<PathBuf>,
    /// How long memory may be held for a deleted pod, and how late a deletion may be, such as 30s or 5m
    #[arg(long, value_name = "TIME", default_value = "1m", value_parser = divvy_agent::config::parse_duration)]
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

/// The subcommands of `divvy audit`.
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    Record(AuditRecordArgs),
}

/// Record the changes of pods and nodes, for `divvy audit` to replay
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  divvy audit record day.log  until Ctrl-C or SIGTERM; then: divvy audit day.log
  divvy audit record day.log --for 10m
      for ten minutes; appends to a file that exists
  divvy audit record - | gzip > day.log.gz

The log is a watch log in JSON lines, with only the fields that an audit reads (no environment, no labels). Recording requires permission to list and watch pods and nodes. \
The file stays readable even if the command is killed. The log notes each interruption of the watch, and the audit then reports what it could not see.")]
pub struct AuditRecordArgs {
    /// The log file; - is standard output
    pub file: PathBuf,
    /// Stop after this time, such as 10m
    #[arg(long, value_name = "TIME", value_parser = divvy_agent::config::parse_duration)]
    pub r#for: Option<std::time::Duration>,
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
    /// Add Divvy's entry to this KubeSchedulerConfiguration (v1, v1beta1 to v1beta3, v1alpha1, or an old Policy); - is standard input
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
    pub kubernetes_version: Option<Version>,
    /// The namespace of the second scheduler, or of the pod that --check creates [default: kube-system; for --check the context's]
    #[arg(short, long, value_name = "NAME", value_parser = object_name)]
    #[cfg_attr(feature = "completions", arg(add = ArgValueCompleter::new(completions::namespaces)))]
    pub namespace: Option<String>,
    /// Check that the running scheduler calls the extender, by one pod that is refused and deleted
    #[arg(long)]
    pub check: bool,
    /// With --check: how long to wait for the scheduler, such as 30s
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = divvy_agent::config::parse_duration)]
    pub timeout: std::time::Duration,
    /// Write to this file instead of standard output; may be the file given with --merge
    #[arg(short, long, value_name = "FILE", conflicts_with = "check")]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: ClusterArgs,
}

/// Check that the API server would accept a name (an RFC 1123 subdomain). The name goes into manifests and shell commands, so nothing else
/// may pass.
fn object_name(text: &str) -> Result<String, String> {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    let inside = text
        .bytes()
        .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == b'-' || c == b'.');
    if text.len() <= 253 && inside && edge(text.chars().next()) && edge(text.chars().last()) {
        Ok(text.to_owned())
    } else {
        Err("a name consists of lower-case letters, digits, - and ., and starts and ends with a letter or digit".to_owned())
    }
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
      the tutorial: two pods on one GPU, then a day on a small cluster
  divvy demo --scenario tutorial    only the two pods
  divvy demo --keep                 keep the cluster up, to try kubectl on it
  divvy demo --nodes my-nodes.toml --keep
  divvy demo -o json | jq -r .text  print every step as a line of JSON

The demo needs no root, no network, and no GPU. The agents, the probes, and the extender are the real programs. The API server, the \
scheduler, the kubelets, the container runtime, and the NVML library are simulated.

Exit status: 0 success; 1 if any step did not end as the scenario says.")]
pub struct DemoArgs {
    /// The scenario to play: tutorial or tour [default: tour; with --nodes, none]
    #[arg(long, value_name = "NAME")]
    pub scenario: Option<String>,
    /// Simulate the nodes of this machine description (TOML)
    #[arg(long, value_name = "FILE")]
    pub nodes: Option<PathBuf>,
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
