//! The scheduler extender: it decides which GPUs of which node a pod gets, and writes the decision with the pod's Binding.
//!
//! - [`core`]: the decisions, without I/O
//! - `host`: the watches, the requests to the API server, and the periodic sweep
//! - [`http`]: kube-scheduler's extender protocol under gpushare's paths, and the API server's webhook for new pods
//! - [`admission`]: the answers to that webhook
//! - [`election`] and `lease`: the election of a leader among several replicas
//! - [`tls`]: the certificates of the extender and its clients
//! - `web`: serves the web page on a separate port
//! - this file: start and shutdown
//!
//! The extender stores nothing. At each start it rebuilds the ledger from the annotations of the pods and nodes that it lists. A GPU's
//! health comes from the node's inventory; gpushare's ConfigMaps `kube-system/unhealthy-gpu-<node>` can exclude further GPUs.

#![forbid(unsafe_code)]

pub mod admission;
mod args;
mod clock;
pub mod core;
pub mod election;
mod error;
mod forward;
mod host;
pub mod http;
pub mod index;
mod lease;
pub mod metrics;
mod recheck;
mod shared;
pub mod tls;
mod web;

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use divvy_kube::client::{ClusterChoice, connect};
use divvy_model::MemoryUnit;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use forward::Forward;
use shared::Leadership;
use tls::listener::TlsDoor;
use tls::names::ClientNames;

pub use crate::core::{CoreTiming, DecideIn, PlacementRules, SCHEDULER_CHECK, check_refusal};
pub use crate::lease::LeaseCandidate;
pub use args::Args;
pub use error::Error;
pub use host::{ExtenderSettings, Served, serve};
pub use shared::ExtenderLimits;
pub use web::{Web, WebPage};

/// The flags of `divvy extender`.
#[derive(Debug, Clone)]
pub struct ExtenderConfig {
    /// `--kubeconfig`: one path, or several separated as in `KUBECONFIG`.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`: the kubeconfig context.
    pub context: Option<String>,
    /// `--listen`: the address and port of the server.
    pub listen: SocketAddr,
    /// `--memory-unit`: the size of one unit of `aliyun.com/gpu-mem` in the whole cluster.
    pub memory_unit: MemoryUnit,
    /// `--policy` and `--decide-in`.
    pub placement: PlacementRules,
    /// `--unhealthy-gpu-configmaps`: read gpushare's ConfigMaps of unhealthy GPUs.
    pub unhealthy_gpu_configmaps: bool,
    /// `--tls-…`: the source of the certificates; `None` means plain HTTP.
    pub tls: Option<tls::CertificateSource>,
    /// `--client-name`: the certificate names of accepted clients, in addition to the other replicas; if empty, `kube-scheduler`.
    pub client_names: Vec<String>,
    /// `--insecure`: allow plain HTTP on an address that other machines can reach.
    pub insecure: bool,
    /// `--webhook`: answer the API server's reviews of new pods.
    pub webhook: bool,
    /// `--leader-elect`: the election among several replicas; `None` if this is the only replica.
    pub lease: Option<LeaseCandidate>,
    /// `--web-…`: the web page; `None` if it is not served.
    pub web: Option<Web>,
}

/// The parts of [`ExtenderConfig`] that say how clients and other replicas reach the extender.
#[derive(Debug, Clone, Default)]
pub struct ExtenderSurroundings {
    /// As in [`ExtenderConfig`]: `None` means plain HTTP.
    pub tls: Option<tls::CertificateSource>,
    /// As in [`ExtenderConfig`].
    pub client_names: Vec<String>,
    /// As in [`ExtenderConfig`]; needs TLS.
    pub webhook: bool,
    /// As in [`ExtenderConfig`]: `None` means the only replica.
    pub lease: Option<LeaseCandidate>,
    /// The web page; `None` if it is not served.
    pub page: Option<WebPage>,
}

/// Run the extender with the flags of `divvy extender` until it is told to stop.
///
/// # Errors
/// Fails as [`run`] does, and if flags contradict each other.
pub async fn main(args: Args) -> Result<(), Error> {
    let stop = divvy_program::until_stopped(args.exit_with_stdin).map_err(Error::Signals)?;
    run(args.try_into()?, stop).await
}

/// Run the extender until `stop` is cancelled. It listens at once, but answers with errors and is not ready until pods and nodes have
/// been listed.
pub async fn run(config: ExtenderConfig, stop: CancellationToken) -> Result<(), Error> {
    let web = config.web.as_ref().map(|web| web.listen);
    for address in [config.listen].into_iter().chain(web) {
        if config.tls.is_none() && !config.insecure && !address.ip().to_canonical().is_loopback() {
            return Err(Error::PlainHttp { address });
        }
    }
    let choice = ClusterChoice {
        kubeconfig: config.kubeconfig,
        context: config.context,
        ..ClusterChoice::default()
    };
    let connection = connect(&choice).await?;
    let listener = divvy_serve::listen(config.listen).map_err(|source| Error::Listen {
        address: config.listen,
        source,
    })?;
    let surroundings = ExtenderSurroundings {
        tls: config.tls,
        client_names: config.client_names,
        webhook: config.webhook,
        lease: config.lease,
        page: config.web.map(WebPage::open).transpose()?,
    };
    let settings = ExtenderSettings {
        placement: config.placement,
        unhealthy_gpu_configmaps: config.unhealthy_gpu_configmaps,
        ..ExtenderSettings::new(config.memory_unit)
    };
    run_with(listener, connection.client, settings, surroundings, stop).await
}

/// Run as [`run`] does, with an existing socket and client.
pub async fn run_with(
    listener: TcpListener,
    client: kube::Client,
    settings: ExtenderSettings,
    surroundings: ExtenderSurroundings,
    stop: CancellationToken,
) -> Result<(), Error> {
    let ExtenderSurroundings {
        tls,
        client_names,
        webhook,
        lease,
        page,
    } = surroundings;
    let protocol = if tls.is_some() { "https" } else { "http" };
    match listener.local_addr() {
        Ok(address) => {
            let policy = settings.placement.policy;
            tracing::info!(%address, protocol, unit = %settings.unit, %policy, "the extender is listening");
        }
        Err(error) => tracing::info!(%error, protocol, "the extender is listening"),
    }
    let server_name = tls.as_ref().map(|source| source.server_name().to_owned());
    let own_name = server_name.clone();
    let names = server_name.as_ref().map(|own| ClientNames::new(&client_names, own));
    let credentials = tls.map(|source| tls::keep(source, client.clone(), stop.clone()));
    // The nonce differs at each start, so that a killed process and its successor have different identities.
    let nonce = RandomState::new().build_hasher().finish();
    let identity = lease.as_ref().map(|candidate| lease::identity(candidate, nonce, protocol));
    let leadership = identity
        .clone()
        .map(|identity| Leadership::new(identity, Forward::new(credentials.clone().zip(server_name))));
    let of_web = client.clone();
    let served = host::serve_with(client, settings, credentials.clone(), leadership, stop.clone());
    let member = lease
        .zip(identity)
        .map(|(candidate, identity)| tokio::spawn(lease::take_part(candidate, identity, served.shared(), stop.clone())));
    let page = match &page {
        None => None,
        Some(page) => {
            let parts = credentials.clone().zip(names.clone()).zip(own_name);
            let tls = parts.map(|((credentials, names), own)| (TlsDoor::new(credentials, names, served.metrics()), own));
            Some(tokio::spawn(web::WebServer::new(page, of_web, tls)?.run(stop.clone())))
        }
    };
    let limits = http::limits(credentials.is_some(), webhook);
    let answering = match credentials.zip(names) {
        None => tokio::spawn(divvy_serve::serve(
            listener,
            divvy_serve::Plain { known: true },
            served.router.clone(),
            limits,
            stop.clone(),
        )),
        Some((credentials, names)) => {
            let router = if webhook {
                served.router.clone().merge(http::webhook(served.shared()))
            } else {
                served.router.clone()
            };
            let door = TlsDoor::new(credentials, names, served.metrics());
            tokio::spawn(divvy_serve::serve(listener, door, router, limits, stop.clone()))
        }
    };
    let failed = tokio::select! {
        () = stop.cancelled() => false,
        () = served.failed() => true,
    };
    stop.cancel();
    // Finish the binds that have begun, so that their answers are not lost.
    let finished = served.finish(Duration::from_secs(5)).await;
    if let Some(member) = member {
        match member.await {
            // A bind in doubt may still be carried out. Then it is safer if the next leader waits until the lease expires.
            Ok(member) if finished => member.release().await,
            Ok(_) => {
                tracing::warn!(
                    "the lease was not released, because some binds are in doubt; another replica can lead after it expires"
                )
            }
            Err(panicked) => return Err(Error::Serve(std::io::Error::other(panicked))),
        }
    }
    if let Some(page) = page {
        page.abort();
    }
    // Only connections without a request are left.
    match tokio::time::timeout(Duration::from_secs(1), answering).await {
        Ok(Ok(())) => {}
        Ok(Err(panicked)) => return Err(Error::Serve(std::io::Error::other(panicked))),
        Err(_elapsed) => tracing::debug!("some connections were still open"),
    }
    if failed {
        return Err(Error::WatchEnded);
    }
    tracing::info!("the extender has stopped");
    Ok(())
}
