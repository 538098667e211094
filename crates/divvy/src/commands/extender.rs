//! `divvy extender`.

use std::net::SocketAddr;
use std::time::Duration;

use divvy_extender::election::Rules;
use divvy_extender::tls::{self, Source};
use divvy_extender::{Candidate, Config, DecideIn, Placement};

use crate::cli::{ContextArgs, Decide, ExtenderArgs, ExtenderReplicas, ExtenderTls};

/// Runs the extender until it is told to stop.
pub async fn run(args: ExtenderArgs) -> anyhow::Result<()> {
    let stopped = super::until_stopped(args.exit_with_stdin)?;
    let ContextArgs { kubeconfig, context } = args.cluster;
    let client_names = args.tls.client_name.clone();
    let tls = tls(args.tls);
    anyhow::ensure!(
        tls.is_some() || !args.webhook,
        "--webhook needs TLS, as the API server calls webhooks over HTTPS only; give --tls-secret NAMESPACE/NAME, or --tls-cert-file, \
         --tls-private-key-file and --client-ca-file"
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

/// Where the extender's namespace is not said.
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
    // The grammar sees to it that they come together.
    Some(Source::Files {
        certificate: args.tls_cert_file?,
        key: args.tls_private_key_file?,
        client_ca: args.client_ca_file?,
        server_name,
    })
}

/// Below that a busy API server makes the leader change all the time.
const SHORTEST_LEASE: Duration = Duration::from_secs(3);

fn candidate(args: ExtenderReplicas, listen: SocketAddr) -> anyhow::Result<Option<Candidate>> {
    if !args.leader_elect {
        return Ok(None);
    }
    anyhow::ensure!(
        args.lease_duration >= SHORTEST_LEASE,
        "--lease-duration {} s is too short: an API server that answers late would make the leader change all the time; give {} s at least",
        args.lease_duration.as_secs(),
        SHORTEST_LEASE.as_secs()
    );
    let ip = args.advertise_address.unwrap_or(listen.ip());
    anyhow::ensure!(
        !ip.is_unspecified(),
        "--leader-elect needs to know where the other replicas reach this one, and --listen {listen} does not say: give --advertise-address \
         (in a pod: its status.podIP)"
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
