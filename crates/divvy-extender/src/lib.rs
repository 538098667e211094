//! The scheduler extender: decides which GPU of which node a pod gets, and writes that with the pod's binding.
//!
//! - [`core`]: the decisions, without I/O
//! - [`http`]: kube-scheduler's protocol and gpushare's paths, and the API server's question about new pods
//! - [`admission`]: the answer to that
//! - this file: the watches, the calls to the API server, and the server's life
//!
//! Nothing is stored: at any start the ledger is rebuilt from the annotations of the pods and nodes that are listed. A GPU's health
//! comes from the node's inventory; gpushare's ConfigMaps `kube-system/unhealthy-gpu-<node>` take further GPUs out.

#![forbid(unsafe_code)]

pub mod admission;
mod args;
pub mod core;
pub mod election;
mod error;
mod forward;
mod host;
pub mod http;
pub mod index;
mod lease;
mod metrics;
mod second_look;
pub mod tls;

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use divvy_kube::client::{Choice, connect};
use divvy_model::MemoryUnit;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use forward::Forward;
use host::Leadership;
use tls::listener::TlsDoor;
use tls::names::Names;

pub use crate::core::{DecideIn, Placement, SCHEDULER_CHECK, Timing, check_refusal};
pub use crate::lease::Candidate;
pub use args::Args;
pub use error::Error;
pub use host::{Limits, Served, Settings, serve};

/// The flags of `divvy extender`.
#[derive(Debug, Clone)]
pub struct Config {
    /// `--kubeconfig`: one path, or several as in `KUBECONFIG`.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`
    pub context: Option<String>,
    /// `--listen`
    pub listen: SocketAddr,
    /// `--memory-unit`: what one unit of `aliyun.com/gpu-mem` is, in the whole cluster.
    pub memory_unit: MemoryUnit,
    /// `--policy`, `--decide-in`
    pub placement: Placement,
    /// `--unhealthy-gpu-configmaps`: read gpushare's ConfigMaps of unhealthy GPUs.
    pub unhealthy_gpu_configmaps: bool,
    /// `--tls-…`: none is plain HTTP.
    pub tls: Option<tls::Source>,
    /// `--client-name`: who is let in with a certificate, beside the other replicas; none: kube-scheduler.
    pub client_names: Vec<String>,
    /// `--insecure`: plain HTTP on an address that others can reach.
    pub insecure: bool,
    /// `--webhook`: answer the API server's question about new pods.
    pub webhook: bool,
    /// `--leader-elect`: with several replicas.
    pub lease: Option<Candidate>,
}

/// How it is reached, and beside whom.
#[derive(Debug, Clone, Default)]
pub struct Surroundings {
    /// None: plain HTTP.
    pub tls: Option<tls::Source>,
    /// As in [`Config`].
    pub client_names: Vec<String>,
    /// As in [`Config`]; it needs TLS.
    pub webhook: bool,
    /// None: the only replica.
    pub lease: Option<Candidate>,
}

/// Run the extender with the flags of `divvy extender` until it is told to stop.
///
/// # Errors
/// As [`run`], and flags that contradict each other.
pub async fn main(args: Args) -> Result<(), Error> {
    let stop = divvy_program::until_stopped(args.exit_with_stdin).map_err(Error::Signals)?;
    run(args.try_into()?, stop).await
}

/// Serves until `stop` is cancelled. Listens at once; answers with an error, and is not ready, until pods and nodes have been
/// listed.
pub async fn run(config: Config, stop: CancellationToken) -> Result<(), Error> {
    if config.tls.is_none() && !config.insecure && !config.listen.ip().to_canonical().is_loopback() {
        return Err(Error::PlainHttp { address: config.listen });
    }
    let choice = Choice {
        kubeconfig: config.kubeconfig,
        context: config.context,
        ..Choice::default()
    };
    let connection = connect(&choice).await?;
    let listener = divvy_serve::listen(config.listen).map_err(|source| Error::Listen {
        address: config.listen,
        source,
    })?;
    let surroundings = Surroundings {
        tls: config.tls,
        client_names: config.client_names,
        webhook: config.webhook,
        lease: config.lease,
    };
    let settings = Settings {
        placement: config.placement,
        unhealthy_gpu_configmaps: config.unhealthy_gpu_configmaps,
        ..Settings::new(config.memory_unit)
    };
    run_with(listener, connection.client, settings, surroundings, stop).await
}

/// As [`run`], on a socket and with a client that are there already, in plain HTTP.
pub async fn run_on(
    listener: TcpListener,
    client: kube::Client,
    settings: Settings,
    stop: CancellationToken,
) -> Result<(), Error> {
    run_with(listener, client, settings, Surroundings::default(), stop).await
}

/// As [`run`], on a socket and with a client that are there already.
pub async fn run_with(
    listener: TcpListener,
    client: kube::Client,
    settings: Settings,
    surroundings: Surroundings,
    stop: CancellationToken,
) -> Result<(), Error> {
    let Surroundings {
        tls,
        client_names,
        webhook,
        lease,
    } = surroundings;
    let protocol = if tls.is_some() { "https" } else { "http" };
    match listener.local_addr() {
        Ok(address) => {
            let policy = settings.placement.policy;
            tracing::info!(%address, protocol, unit = %settings.unit, %policy, "the extender listens");
        }
        Err(error) => tracing::info!(%error, protocol, "the extender listens"),
    }
    let server_name = tls.as_ref().map(|source| source.server_name().to_owned());
    let names = server_name.as_ref().map(|own| Names::new(&client_names, own));
    let credentials = tls.map(|source| tls::keep(source, client.clone(), stop.clone()));
    // Another one at each start: a process that was killed and its successor are two.
    let nonce = RandomState::new().build_hasher().finish();
    let identity = lease.as_ref().map(|candidate| lease::identity(candidate, nonce, protocol));
    let leadership = identity
        .clone()
        .map(|identity| Leadership::new(identity, Forward::new(credentials.clone().zip(server_name))));
    let served = host::serve_with(client, settings, credentials.clone(), leadership, stop.clone());
    let member = lease
        .zip(identity)
        .map(|(candidate, identity)| tokio::spawn(lease::take_part(candidate, identity, served.shared(), stop.clone())));
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
            let router = match webhook {
                true => served.router.clone().merge(http::webhook(served.shared())),
                false => served.router.clone(),
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
    // Binds that were begun are ended, so that their answers are not lost.
    let finished = served.finish(Duration::from_secs(5)).await;
    if let Some(member) = member {
        match member.await {
            // What is in doubt may be carried out later: then the next leader had better wait for the lease to end.
            Ok(member) if finished => member.release().await,
            Ok(_) => {
                tracing::warn!("the lease is not released, as some binds are in doubt; another replica leads when it has ended")
            }
            Err(panicked) => return Err(Error::Serve(std::io::Error::other(panicked))),
        }
    }
    // All that is left are connections without a request.
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
