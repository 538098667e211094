//! The explainer: it answers `divvy why` for users who may not list nodes and pods. It tells a user who may `get` a pod what keeps that pod from
//! starting.
//!
//! - `tunnel`: the only entrance, TLS inside the API server's service proxy
//! - `handler`: handles one question, from the token (whose user it finds out, and what the user may see) to the answer
//! - `snapshot_cache`: reads the state of the cluster, once for all questions within some seconds
//! - `identity`: the certificate by which clients identify the explainer
//! - `publish`: writes that certificate where every user can read it
//! - [`service_proxy`]: how a user's program reaches this one through the API server
//! - [`read_cluster`], [`from_objects`], [`related`]: read the cluster as values of `divvy-why`; `divvy why` calls these modules
//!   itself if its user may list nodes and pods
//!
//! **The explainer is a separate program and not part of the extender**, because every user of the cluster can reach it. It has no right to place
//! pods, its load and memory do not affect the extender, and if it is down, only these answers are missing.

#![forbid(unsafe_code)]

mod args;
pub mod from_objects;
mod handler;
mod identity;
mod metrics;
mod publish;
pub mod read_cluster;
mod refusal;
pub mod related;
pub mod service_proxy;
mod snapshot_cache;
mod tunnel;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::service_proxy::PATH;
use axum::Router;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use divvy_exposition::MetricsFormat;
use divvy_kube::client::{ClusterChoice, connect};
use divvy_model::MemoryUnit;
use divvy_serve::{CallerLimits, ServerLimits};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

pub use args::Args;
use handler::{Handler, problem};
use identity::ServerIdentity;
pub use metrics::ExplainerMetrics;
use tunnel::Tunnels;

/// The flags of `divvy explainer`.
#[derive(Debug, Clone)]
pub struct ExplainerConfig {
    /// `--kubeconfig`: one path, or several separated as in `KUBECONFIG`.
    pub kubeconfig: Option<PathBuf>,
    /// `--context`: the kubeconfig context.
    pub context: Option<String>,
    /// `--listen`: the address and port of the server.
    pub listen: SocketAddr,
    /// The other flags.
    pub settings: ExplainerSettings,
}

/// The configuration of a running explainer.
#[derive(Debug, Clone)]
pub struct ExplainerSettings {
    /// `--memory-unit`: the unit if no agent publishes one.
    pub memory_unit: MemoryUnit,
    /// `--configmap`: the namespace and name of the ConfigMap that tells users how to reach the explainer.
    pub configmap: (String, String),
}

/// Why the explainer could not start or has stopped.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// There is no usable client configuration, or the cluster cannot be reached.
    #[error(transparent)]
    Cluster(#[from] divvy_kube::Error),
    /// The address is in use, or does not belong to this machine.
    #[error("the explainer cannot listen on {address}: {source}; choose another address with --listen ADDRESS:PORT")]
    Listen {
        /// The address of `--listen`.
        address: SocketAddr,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The process could not install its signal handlers.
    #[error("the program could not wait for signals: {0}")]
    Signals(#[source] std::io::Error),
    /// No key or certificate could be made.
    #[error("the explainer's certificate could not be made: {0}")]
    Certificate(#[source] rcgen::Error),
    /// A server cannot use the key and the certificate.
    #[error("the explainer's certificate could not be made: {0}")]
    Identity(#[source] rustls::Error),
    /// The server panicked.
    #[error("the explainer stopped serving: {0}")]
    Serve(#[source] std::io::Error),
}

/// Run the explainer with the flags of `divvy explainer` until it is told to stop.
///
/// # Errors
/// Fails as [`run`] does.
pub async fn main(args: Args) -> Result<(), Error> {
    let stop = divvy_program::until_stopped(args.exit_with_stdin).map_err(Error::Signals)?;
    run(args.into(), stop).await
}

/// Run the explainer until `stop` is cancelled.
///
/// # Errors
/// Fails if there is no cluster to connect to, or if the explainer cannot listen on the address.
pub async fn run(config: ExplainerConfig, stop: CancellationToken) -> Result<(), Error> {
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
    run_with(listener, connection.client, config.settings, stop).await
}

/// Run as [`run`] does, with an existing socket and client.
///
/// # Errors
/// Fails if the certificate cannot be made, or if the server panics.
pub async fn run_with(
    listener: TcpListener,
    client: kube::Client,
    settings: ExplainerSettings,
    stop: CancellationToken,
) -> Result<(), Error> {
    match listener.local_addr() {
        Ok(address) => tracing::info!(%address, unit = %settings.memory_unit, "the explainer is listening"),
        Err(error) => tracing::info!(%error, "the explainer is listening"),
    }
    let identity = ServerIdentity::new()?;
    let metrics = Arc::new(ExplainerMetrics::default());
    let published = publish::keep(settings.configmap, client.clone(), identity.certificate, stop.clone());
    let questions = Handler::router(client, settings.memory_unit, metrics.clone());
    let tunnels = Tunnels::new(identity.server, questions, stop.clone());
    let ready = move || async move {
        if *published.borrow() {
            (StatusCode::OK, "ok").into_response()
        } else {
            problem(
                StatusCode::SERVICE_UNAVAILABLE,
                "the ConfigMap that tells users how to reach the explainer has not been written; see the log",
            )
        }
    };
    let router = Router::new()
        .route(PATH, get(tunnel::open))
        .with_state(tunnels)
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route(
            "/metrics",
            get(move |headers: HeaderMap| async move { text_of(&metrics, &headers) }),
        )
        .fallback(no_such_path);
    let serving = divvy_serve::serve(listener, divvy_serve::Plain { known: false }, router, limits(), stop);
    // When serving ends, only connections without a request are left.
    tokio::spawn(serving)
        .await
        .map_err(|panicked| Error::Serve(std::io::Error::other(panicked)))?;
    tracing::info!("the explainer has stopped");
    Ok(())
}

fn text_of(metrics: &ExplainerMetrics, headers: &HeaderMap) -> Response {
    let accept = headers.get_all(header::ACCEPT).iter();
    let format = MetricsFormat::negotiate(accept.filter_map(|value| value.to_str().ok()));
    ([(header::CONTENT_TYPE, format.content_type())], metrics.text(format)).into_response()
}

async fn no_such_path(uri: Uri) -> Response {
    problem(
        StatusCode::NOT_FOUND,
        &format!(
            "there is no such path: {:.100}; run `divvy why` to send a question",
            uri.path()
        ),
    )
}

/// Return the limits of the server, to which API servers, kubelets, and Prometheus connect. No caller is identified at this
/// level, because users send their tokens only in TLS inside the connection.
fn limits() -> ServerLimits {
    let share = CallerLimits {
        connections: 64,
        // One API server forwards the questions of all its users.
        per_address: 32,
        idle: Duration::from_secs(60),
        body_bytes: 4 << 10,
    };
    ServerLimits {
        known: share,
        unknown: share,
        handshakes: 64,
        handshakes_per_address: 32,
        first_byte: Duration::from_secs(1),
        handshake: Duration::from_secs(5),
        header: Duration::from_secs(5),
        body: Duration::from_secs(5),
        request: Duration::from_secs(30),
        header_bytes: 32 << 10,
        bodies_bytes: 1 << 20,
    }
}
