//! The HTTP endpoints `/healthz`, `/readyz`, `/metrics`, `/metrics/dcgm`, and `/v1/usage`.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use divvy_exposition::MetricsFormat;
use divvy_serve::{CallerLimits, Plain, ServerLimits};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::info;

use crate::Error;
use crate::observed::{Observed, ShownUsage};

/// Limits for an endpoint that any pod may reach. The callers that matter are the kubelet and a metrics collector, which fetch
/// three small pages.
const LIMITS: ServerLimits = {
    let share = CallerLimits {
        connections: 16,
        per_address: 8,
        idle: Duration::from_secs(90),
        body_bytes: 1 << 10,
    };
    ServerLimits {
        known: share,
        unknown: share,
        handshakes: 0,
        handshakes_per_address: 0,
        first_byte: Duration::from_secs(1),
        handshake: Duration::from_secs(5),
        header: Duration::from_secs(5),
        body: Duration::from_secs(10),
        request: Duration::from_secs(30),
        header_bytes: 16 << 10,
        bodies_bytes: 0,
    }
};

/// Listen on an address that was set by `option`.
pub(crate) fn listen(address: SocketAddr, option: &'static str) -> Result<TcpListener, Error> {
    divvy_serve::listen(address).map_err(|source| Error::Listen { address, option, source })
}

pub(crate) async fn serve(listener: TcpListener, observed: Arc<dyn Observed>, stop: CancellationToken) {
    if let Ok(address) = listener.local_addr() {
        info!(%address, "serving /healthz, /readyz and /metrics");
    }
    let router = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/metrics/dcgm", get(dcgm))
        .route("/v1/usage", get(usage))
        .with_state(observed);
    divvy_serve::serve(listener, Plain { known: false }, router, LIMITS, stop).await;
}

/// Answer with the names of the parts that are not ready. The reasons are left out: they contain paths of the node and the API server's
/// answers, and any pod of the cluster may be able to call this.
async fn ready(State(observed): State<Arc<dyn Observed>>) -> Response {
    let parts = observed.ready().parts();
    if parts.is_empty() {
        return "ok\n".into_response();
    }
    let text = format!("not ready: {}; see the log for the reasons\n", parts.join(", "));
    (StatusCode::SERVICE_UNAVAILABLE, text).into_response()
}

async fn metrics(State(observed): State<Arc<dyn Observed>>, headers: HeaderMap) -> Response {
    let accept = headers.get_all(header::ACCEPT).iter();
    let format = MetricsFormat::negotiate(accept.filter_map(|value| value.to_str().ok()));
    observed.measure().await;
    ([(header::CONTENT_TYPE, format.content_type())], observed.metrics(format)).into_response()
}

async fn dcgm(State(observed): State<Arc<dyn Observed>>) -> Response {
    observed.measure().await;
    match observed.dcgm() {
        Some(text) => ([(header::CONTENT_TYPE, MetricsFormat::Text.content_type())], text).into_response(),
        None => (
            StatusCode::NOT_FOUND,
            "these metrics are not served; divvy agent --dcgm-metrics (agent.metrics.dcgm=true in the chart) serves them\n",
        )
            .into_response(),
    }
}

async fn usage(State(observed): State<Arc<dyn Observed>>, headers: HeaderMap) -> Response {
    observed.measure().await;
    let Some(ShownUsage { tag, usage }) = observed.usage() else {
        return (StatusCode::NOT_FOUND, "this program does not measure what containers use\n").into_response();
    };
    let has = headers.get_all(header::IF_NONE_MATCH).iter();
    let is_known = has.filter_map(|value| value.to_str().ok()).any(|value| matches(value, &tag));
    if is_known {
        return (StatusCode::NOT_MODIFIED, [(header::ETAG, tag)]).into_response();
    }
    match serde_json::to_string(&usage) {
        Ok(text) => {
            let kind = "application/json".to_owned();
            ([(header::CONTENT_TYPE, kind), (header::ETAG, tag)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n")).into_response(),
    }
}

/// Report whether a value of If-None-Match names the tag: a list, compared weakly (RFC 9110, section 13.1.2).
fn matches(value: &str, tag: &str) -> bool {
    let mut tags = value.split(',').map(str::trim);
    tags.any(|of| of == "*" || of.strip_prefix("W/").unwrap_or(of) == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tag_is_found_in_a_list_and_a_weak_one_counts() {
        for (value, expected) in [
            ("\"a-1\"", true),
            ("W/\"a-1\"", true),
            ("\"b-1\", \"a-1\"", true),
            ("*", true),
            ("", false),
            ("\"a-11\"", false),
            ("a-1", false),
        ] {
            assert_eq!(matches(value, "\"a-1\""), expected, "{value}");
        }
    }
}
