//! `divvy extender`.

use divvy_extender::Config;
use divvy_extender::tls::{self, Source};

use crate::cli::{ClusterArgs, ExtenderArgs, ExtenderTls};

/// Runs the extender until it is told to stop.
pub async fn run(args: ExtenderArgs) -> anyhow::Result<()> {
    let stopped = super::until_stopped(args.exit_with_stdin)?;
    let ClusterArgs { kubeconfig, context } = args.cluster;
    let config = Config {
        kubeconfig,
        context,
        listen: args.listen,
        memory_unit: args.memory_unit,
        tls: tls(args.tls),
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
