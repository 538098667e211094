//! The flags of `divvy extender`.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use divvy_model::MemoryUnit;
use divvy_policy::Policy;
use divvy_program::ContextArgs;
use divvy_program::values::{ValueError, duration, namespaced};

use crate::core::{DecideIn, PlacementRules};
use crate::election::Rules;
use crate::lease::LeaseCandidate;
use crate::tls::{self, CertificateSource};
use crate::{Error, ExtenderConfig, Web};

/// Run alongside kube-scheduler: choose the node and the GPU of each pod
#[derive(Debug, clap::Args)]
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

With --decide-in prioritize (the default) kube-scheduler adds its own scores. With filter the extender lets only the best node pass. This suits \
schedulers whose configuration has no prioritizeVerb, but pods' preferences for nodes are then ignored.

With --web-listen the extender also serves a web page of the cluster's GPUs. A request needs a token (header Authorization, or the page's own form) that the API server accepts (TokenReview), of a user who may list nodes and pods in the whole cluster (SubjectAccessReview). Without certificates, the page is served on the loopback address only, as everything else.

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
  - {name: amd.com/gpu, ignoredByScheduler: false}
  - {name: gpu.intel.com/xe, ignoredByScheduler: false}
`divvy scheduler-config` prints the whole file; with --for it also says where to put it.")]
pub struct Args {
    #[command(flatten)]
    pub cluster: ContextArgs,
    /// The address and port to listen on
    #[arg(long, env = "DIVVY_LISTEN", value_name = "ADDR:PORT", default_value = "127.0.0.1:32766")]
    pub listen: SocketAddr,
    /// Size of one unit of aliyun.com/gpu-mem: GiB, MiB, or a size such as 256MiB; must match every agent's
    #[arg(long, env = "DIVVY_MEMORY_UNIT", value_name = "UNIT", default_value = "GiB")]
    pub memory_unit: MemoryUnit,
    /// The policy that chooses the node and the GPU of a pod
    #[arg(long, env = "DIVVY_POLICY", value_name = "NAME", default_value = "divvy", value_parser = Policy::for_scheduling)]
    pub policy: Policy,
    /// Where the node is chosen: prioritize (kube-scheduler chooses, with the extender's scores) or filter (the extender chooses)
    #[arg(long, env = "DIVVY_DECIDE_IN", value_name = "VERB", default_value = "prioritize")]
    pub decide_in: DecideIn,
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
    pub tls: TlsArgs,
    #[command(flatten)]
    pub replicas: ReplicaArgs,
    #[command(flatten)]
    pub web: WebPageArgs,
    /// End when standard input is closed, so that the extender does not outlive the program that started it.
    #[arg(long, hide = true)]
    pub exit_with_stdin: bool,
}

/// The flags for the extender's certificates.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "TLS")]
pub struct TlsArgs {
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
    pub tls_lifetime: Duration,
}

/// The flags for several replicas of the extender, of which only the leader binds pods.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Several replicas")]
pub struct ReplicaArgs {
    /// Bind pods only while holding a Lease; the other replicas filter, and forward bind requests to the Lease's holder
    #[arg(long, env = "DIVVY_LEADER_ELECT", value_name = "BOOL", num_args = 0..=1, require_equals = true, default_value_t = false,
        default_missing_value = "true", action = clap::ArgAction::Set)]
    pub leader_elect: bool,
    /// The Lease to use for leader election
    #[arg(long, env = "DIVVY_LEASE", value_name = "NAMESPACE/NAME", default_value = "divvy-system/divvy-extender", value_parser = namespaced)]
    pub lease: (String, String),
    /// How long the followers wait for a silent leader; the leader itself stops binding after two thirds of that time without renewal
    #[arg(long, env = "DIVVY_LEASE_DURATION", value_name = "TIME", default_value = "15s", value_parser = duration)]
    pub lease_duration: Duration,
    /// The address at which the other replicas reach this one [default: the address of --listen, unless that is 0.0.0.0 or ::]
    #[arg(long, env = "DIVVY_ADVERTISE_ADDRESS", value_name = "ADDR")]
    pub advertise_address: Option<IpAddr>,
    /// The name of this replica in the Lease and in logs, usually its pod's name [default: the host name]
    #[arg(long, env = "DIVVY_REPLICA", value_name = "NAME")]
    pub replica: Option<String>,
}

/// The flags of the web page.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Web page")]
pub struct WebPageArgs {
    /// Also serve a web page of the cluster's GPUs at this address and port, as `divvy web` does, to users who may list nodes and pods in the whole cluster
    #[arg(long, env = "DIVVY_WEB_LISTEN", value_name = "ADDR:PORT")]
    pub web_listen: Option<SocketAddr>,
    /// A name by which browsers reach the page, such as divvy.example.com; may be repeated. localhost and the name in the extender's certificate are always accepted
    #[arg(
        long,
        env = "DIVVY_WEB_HOST",
        value_name = "NAME",
        value_delimiter = ',',
        requires = "web_listen"
    )]
    pub web_host: Vec<String>,
}

/// The shortest lifetime of a certificate.
const SHORTEST_LIFETIME: Duration = Duration::from_secs(6);

/// Why a text is not a lifetime of certificates.
#[derive(Debug, thiserror::Error)]
enum LifetimeError {
    #[error(transparent)]
    NotADuration(#[from] ValueError),
    #[error(
        "a certificate that is valid for less than {} s would be renewed all the time; write a longer time, such as 30d",
        SHORTEST_LIFETIME.as_secs()
    )]
    Short,
}

/// Parse how long a certificate is valid: a duration, or a number of days such as `30d`.
fn lifetime(text: &str) -> Result<Duration, LifetimeError> {
    let time = match text.strip_suffix('d').map(str::parse::<u32>) {
        Some(Ok(days)) => Duration::from_secs(u64::from(days) * 86_400),
        _ => duration(text)?,
    };
    if time < SHORTEST_LIFETIME {
        return Err(LifetimeError::Short);
    }
    Ok(time)
}

impl TryFrom<Args> for ExtenderConfig {
    type Error = Error;

    fn try_from(args: Args) -> Result<ExtenderConfig, Error> {
        let client_names = args.tls.client_name.clone();
        let tls = tls(args.tls);
        if tls.is_none() && args.webhook {
            return Err(Error::Flags(
                "--webhook needs TLS, because the API server calls webhooks only over HTTPS; add --tls-secret NAMESPACE/NAME, or --tls-cert-file, \
                 --tls-private-key-file, and --client-ca-file"
                    .to_owned(),
            ));
        }
        Ok(ExtenderConfig {
            kubeconfig: args.cluster.kubeconfig,
            context: args.cluster.context,
            listen: args.listen,
            memory_unit: args.memory_unit,
            placement: PlacementRules {
                policy: args.policy,
                decide_in: args.decide_in,
            },
            unhealthy_gpu_configmaps: args.unhealthy_gpu_configmaps,
            tls,
            client_names,
            insecure: args.insecure,
            webhook: args.webhook,
            lease: candidate(args.replicas, args.listen)?,
            web: args.web.web_listen.map(|listen| Web {
                listen,
                hosts: args.web.web_host,
            }),
        })
    }
}

/// The extender's namespace if no flag names it.
const NAMESPACE: &str = "divvy-system";

fn tls(args: TlsArgs) -> Option<CertificateSource> {
    let name = |namespace: &str| {
        args.tls_server_name
            .clone()
            .unwrap_or_else(|| tls::default_server_name(namespace))
    };
    if let Some((namespace, secret)) = &args.tls_secret {
        return Some(CertificateSource::Secret {
            namespace: namespace.clone(),
            name: secret.clone(),
            server_name: name(namespace),
            lifetime: args.tls_lifetime,
        });
    }
    let server_name = name(NAMESPACE);
    // The command-line grammar requires these three flags together.
    Some(CertificateSource::Files {
        certificate: args.tls_cert_file?,
        key: args.tls_private_key_file?,
        client_ca: args.client_ca_file?,
        server_name,
    })
}

/// The shortest lease duration. With a shorter one, the late answers of a busy API server would change the leader all the time.
const SHORTEST_LEASE: Duration = Duration::from_secs(3);

fn candidate(args: ReplicaArgs, listen: SocketAddr) -> Result<Option<LeaseCandidate>, Error> {
    if !args.leader_elect {
        return Ok(None);
    }
    if args.lease_duration < SHORTEST_LEASE {
        return Err(Error::Flags(format!(
            "--lease-duration {} s is too short: late answers of the API server would change the leader all the time; use at least {} s",
            args.lease_duration.as_secs(),
            SHORTEST_LEASE.as_secs()
        )));
    }
    let ip = args.advertise_address.unwrap_or(listen.ip());
    if ip.is_unspecified() {
        return Err(Error::Flags(format!(
            "--leader-elect needs the address at which the other replicas reach this one, and --listen {listen} is not such an address; add \
             --advertise-address (in a pod: its status.podIP)"
        )));
    }
    let (namespace, name) = args.lease;
    let machine = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(Some(LeaseCandidate {
        namespace,
        name,
        replica: args.replica.unwrap_or_else(machine),
        address: SocketAddr::new(ip, listen.port()),
        rules: Rules::of(args.lease_duration),
    }))
}
