//! Connections through the API server's service proxy, inside which the user's program and the explainer use TLS.
//!
//! The proxy removes the user's token and does not check the Service's certificate. If the token were sent in another header instead of inside
//! TLS, any program that answers at the Service's address would get it.

use std::sync::Arc;
use std::time::Duration;

use crate::service_proxy::PROTOCOL;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::server::conn::http1;
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use rustls::ServerConfig;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;
use tokio_util::sync::CancellationToken;

use crate::handler::problem;

/// The maximum number of tunnels at the same time.
const TUNNELS: usize = 16;
/// The longest life of a tunnel, from the handshake to the end of the last question. A client with more questions connects again.
const LIFE: Duration = Duration::from_secs(120);
/// Timeout of the TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Timeout for the next question to arrive, from the handshake or the end of the previous question.
const QUESTION: Duration = Duration::from_secs(5);
/// The maximum size in bytes of a request's headers. A token has up to 16 KiB.
const HEADER_BYTES: usize = 32 << 10;

#[derive(Clone)]
pub(crate) struct Tunnels {
    server: Arc<ServerConfig>,
    questions: Router,
    places: Arc<Semaphore>,
    stop: CancellationToken,
}

/// Why a tunnel ended early.
#[derive(Debug, thiserror::Error)]
enum BrokenTunnel {
    #[error(transparent)]
    Http(#[from] hyper::Error),
    #[error(transparent)]
    Tls(#[from] std::io::Error),
    #[error("no handshake within {HANDSHAKE:?}")]
    Late,
}

impl Tunnels {
    pub(crate) fn new(server: Arc<ServerConfig>, questions: Router, stop: CancellationToken) -> Tunnels {
        Tunnels {
            server,
            questions,
            places: Arc::new(Semaphore::new(TUNNELS)),
            stop,
        }
    }

    async fn carry(self, upgrade: OnUpgrade) -> Result<(), BrokenTunnel> {
        let shaken = async {
            let stream = TokioIo::new(upgrade.await?);
            Ok::<_, BrokenTunnel>(TlsAcceptor::from(self.server).accept(stream).await?)
        };
        let tls = tokio::time::timeout(HANDSHAKE, shaken).await;
        let tls = tls.map_err(|_elapsed| BrokenTunnel::Late)??;
        let served = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(QUESTION)
            .max_buf_size(HEADER_BYTES)
            .serve_connection(TokioIo::new(tls), TowerToHyperService::new(self.questions));
        Ok(served.await?)
    }
}

pub(crate) async fn open(State(tunnels): State<Tunnels>, mut request: Request) -> Response {
    let asked = request.headers().get(header::UPGRADE).is_some_and(|value| value == PROTOCOL);
    let (true, Some(upgrade)) = (asked, request.extensions_mut().remove::<OnUpgrade>()) else {
        let text = format!("this path only accepts connections with `Upgrade: {PROTOCOL}`, such as those of `divvy why`");
        return problem(StatusCode::BAD_REQUEST, &text);
    };
    let Ok(place) = tunnels.places.clone().try_acquire_owned() else {
        let text = format!("{TUNNELS} connections of `divvy why` are open; try again in a few seconds");
        return problem(StatusCode::SERVICE_UNAVAILABLE, &text);
    };
    tokio::spawn(async move {
        let stop = tunnels.stop.clone();
        let carried = tokio::time::timeout(LIFE, tunnels.carry(upgrade));
        tokio::select! {
            () = stop.cancelled() => {}
            carried = carried => match carried {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a connection through the API server ended"),
                Err(_elapsed) => tracing::debug!("a connection through the API server was closed after {LIFE:?}"),
            },
        }
        drop(place);
    });
    let headers = [
        (header::CONNECTION, HeaderValue::from_static("upgrade")),
        (header::UPGRADE, HeaderValue::from_static(PROTOCOL)),
    ];
    (StatusCode::SWITCHING_PROTOCOLS, headers).into_response()
}
