//! `/healthz`, `/readyz`, `/metrics`.

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::Error;
use crate::agent::Agent;

pub(crate) async fn listen(address: SocketAddr) -> Result<TcpListener, Error> {
    TcpListener::bind(address)
        .await
        .map_err(|source| Error::Listen { address, source })
}

pub(crate) async fn serve(listener: TcpListener, agent: Arc<Agent>, stop: CancellationToken) -> Result<(), Error> {
    if let Ok(address) = listener.local_addr() {
        info!(%address, "serving /healthz, /readyz and /metrics");
    }
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .with_state(agent);
    axum::serve(listener, router)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
        .map_err(|error| Error::Ended {
            part: "the HTTP server",
            text: error.to_string(),
        })
}

async fn ready(State(agent): State<Arc<Agent>>) -> Response {
    let reasons = agent.ready.reasons();
    if reasons.is_empty() {
        return "ok\n".into_response();
    }
    let mut text = reasons.join("\n");
    text.push('\n');
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

async fn metrics(State(agent): State<Arc<Agent>>) -> Response {
    let text = agent.metrics.text(&agent.core());
    match text {
        Ok(text) => {
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, kind)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}
