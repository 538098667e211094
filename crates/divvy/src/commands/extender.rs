//! `divvy extender`: turns the flags into the extender's configuration, and runs the extender.

use std::net::SocketAddr;
use std::time::Duration;

use divvy_extender::election::Rules;
use divvy_extender::tls::{self, Source};
use divvy_extender::{Candidate, Config, DecideIn, Placement};

use crate::cli::{ContextArgs, Decide, ExtenderArgs, ExtenderReplicas, ExtenderTls};

/// Run the extender until SIGTERM or SIGINT arrives.
pub async fn run(args: ExtenderArgs) -> anyhow::Result<()> {
    let stopped = super::until_stopped(args.exit_with_stdin)?;
    let ContextArgs { kubeconfig, context } = args.cluster;
    let client_names = args.tls.client_name.clone();
    let tls = tls(args.tls);
    anyhow::ensure!(
        tls.is_some() || !args.webhook,
        "--webhook needs TLS, because the API server calls webhooks only over HTTPS; add --tls-secret NAMESPACE/NAME, or --tls-cert-file, \
         --tls-private-key-file, and --client-ca-file"
    );
    let config = Config {
        kubeconfig,
        context,
        listen: args.listen,
        memory_unit: args.memory_unit,
        placement: Placement {
            policy: args.policy,
            decide_in: match args.decide_in {
                Decide::Prioritize => DecideIn::Prioritize,
                Decide::Filter => DecideIn::Filter,
            },
        },
        unhealthy_gpu_configmaps: args.unhealthy_gpu_configmaps,
        tls,
        client_names,
        insecure: args.insecure,
        webhook: args.webhook,
        lease: candidate(args.replicas, args.listen)?,
    };
    Ok(divvy_extender::run(config, stopped).await?)
}

/// The extender's namespace if no flag names it.
const NAMESPACE: &str = "divvy-system";

fn tls(args: ExtenderTls) -> Option<Source> {
    let name = |namespace: &str| {
        args.tls_server_name
            .clone()
            .unwrap_or_else(|| tls::default_server_name(namespace))
    };
    if let Some((namespace, secret)) = &args.tls_secret {
        return Some(Source::Secret {
            namespace: namespace.clone(),
            name: secret.clone(),
            server_name: name(namespace),
            lifetime: args.tls_lifetime,
        });
    }
    let server_name = name(NAMESPACE);
    // The command-line grammar requires these three flags together.
    Some(Source::Files {
        certificate: args.tls_cert_file?,
        key: args.tls_private_key_file?,
        client_ca: args.client_ca_file?,
        server_name,
    })
}

/// The shortest lease duration. With a shorter one, the late answers of a busy API server would change the leader all the time.
const SHORTEST_LEASE: Duration = Duration::from_secs(3);

fn candidate(args: ExtenderReplicas, listen: SocketAddr) -> anyhow::Result<Option<Candidate>> {
    if !args.leader_elect {
        return Ok(None);
    }
    anyhow::ensure!(
        args.lease_duration >= SHORTEST_LEASE,
        "--lease-duration {} s is too short: late answers of the API server would change the leader all the time; use at least {} s",
        args.lease_duration.as_secs(),
        SHORTEST_LEASE.as_secs()
    );
    let ip = args.advertise_address.unwrap_or(listen.ip());
    anyhow::ensure!(
        !ip.is_unspecified(),
        "--leader-elect needs the address at which the other replicas reach this one, and --listen {listen} is not such an address; add \
         --advertise-address (in a pod: its status.podIP)"
    );
    let (namespace, name) = args.lease;
    let machine = || rustix::system::uname().nodename().to_string_lossy().into_owned();
    Ok(Some(Candidate {
        namespace,
        name,
        replica: args.replica.unwrap_or_else(machine),
        address: SocketAddr::new(ip, listen.port()),
        rules: Rules::of(args.lease_duration),
    }))
}
