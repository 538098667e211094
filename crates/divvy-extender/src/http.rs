//! The HTTP server: kube-scheduler's extender protocol under gpushare's paths, pages for people and Prometheus, and the API server's
//! webhook ([`crate::admission`]).
//!
//! Sources: kube-scheduler's `pkg/scheduler/extender.go` and `k8s.io/kube-scheduler/extender/v1`; gpushare-scheduler-extender's
//! `pkg/routes/routes.go`. Errors of filter and bind are answered with HTTP 200 and `Error` in the body: kube-scheduler discards the
//! body of any other status, and the user would never see the reason.

mod inspect;
mod wire;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::index::Feed;
use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{DefaultBodyLimit, FromRequest as _, Path, Request, State};
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use divvy_exposition::MetricsFormat;
use divvy_kube::convert;
use divvy_serve::{CallerLimits, ServerLimits};
use serde::Serialize;
use tokio::sync::Semaphore;
use tracing::field::{Empty, display};
use tracing::{Span, instrument};

use crate::admission;
use crate::core::{EVICTIONS_AT_ONCE, Eviction, NotSynced};
use crate::forward::FORWARDED;
use crate::lease;
use crate::metrics::{ClientRefusal, Scrape};
use crate::shared::{ExtenderState, Leadership};
use crate::tls::listener::{ClientIdentity, Peer};
use wire::{BindResult, FilterResult, PreemptionResult, Priorities};

/// The answer of gpushare's extender to `/version`, byte for byte, because tools compare it.
const GPUSHARE_VERSION: &str = "0.1.0";

/// The maximum size of a request body in bytes. A filter request with the whole Node objects of 5,000 nodes has about 40 MiB.
const LARGEST_BODY: usize = 64 << 20;

/// The maximum size of an AdmissionReview in bytes. An API server reads at most 3 MiB of a request, and etcd keeps objects of at
/// most 1.5 MiB. A review of a new pod contains the pod once.
const LARGEST_REVIEW: usize = 3 << 20;

/// The maximum number of reviews that are read and answered at the same time. With [`LARGEST_REVIEW`] and two copies of a body
/// while it is assembled, the reviews take at most 48 MiB.
const REVIEWS: usize = 8;
/// How long a review may wait for its turn. The sum of this and [`REVIEW_BODY`] is the 3 s that the API server waits
/// (`timeoutSeconds` of the webhook that `divvy scheduler-config` prints).
const REVIEW_TURN: Duration = Duration::from_secs(2);
/// How long the body of a review may take to arrive.
const REVIEW_BODY: Duration = Duration::from_secs(1);

/// The largest review, in bytes, that is parsed on the spot. A pod has a few kilobytes. Larger reviews are parsed on another
/// thread, one at a time, so that neither kube-scheduler nor a probe has to wait.
const SMALL_REVIEW: usize = 64 << 10;

/// The maximum size in bytes of the body of a request without a client certificate, if the webhook is off. Such a request only
/// reads a page.
const LARGEST_QUESTION: usize = 4 << 10;

/// Return the server's limits. With `tls`, a caller that presents no certificate is unknown. Without `tls`, every caller is known: anyone who
/// can connect may place pods, which is why `--listen` is then the loopback address.
pub(crate) fn limits(tls: bool, webhook: bool) -> ServerLimits {
    const CONNECTIONS: usize = 256;
    const UNKNOWN: usize = 32;
    let known = if tls { CONNECTIONS - UNKNOWN } else { CONNECTIONS };
    ServerLimits {
        known: CallerLimits {
            connections: known,
            per_address: known,
            // Longer than Go's http.Transport keeps an idle connection (90 s), so that kube-scheduler closes the connection. A bind that
            // is sent while the server closes the connection would be lost and only tried again after a back-off.
            idle: Duration::from_secs(100),
            body_bytes: LARGEST_BODY,
        },
        unknown: CallerLimits {
            connections: UNKNOWN,
            // One address cannot take all connections, but an API server that sends many reviews at once has enough.
            per_address: UNKNOWN / 2,
            idle: Duration::from_secs(90),
            body_bytes: if webhook { LARGEST_REVIEW } else { LARGEST_QUESTION },
        },
        handshakes: 256,
        handshakes_per_address: 64,
        first_byte: Duration::from_secs(1),
        handshake: Duration::from_secs(5),
        header: Duration::from_secs(5),
        // kube-scheduler waits at most 5 s (httpTimeout) for a whole call.
        body: Duration::from_secs(10),
        request: Duration::from_secs(30),
        header_bytes: 64 << 10,
        // One body of the largest size, and room for others.
        bodies_bytes: 96 << 20,
    }
}

pub(crate) fn router(shared: Arc<ExtenderState>) -> Router {
    Router::new()
        .route("/gpushare-scheduler/filter", post(filter))
        .route("/gpushare-scheduler/prioritize", post(prioritize))
        .route("/gpushare-scheduler/preempt", post(preempt))
        .route("/gpushare-scheduler/bind", post(bind))
        .route("/gpushare-scheduler/inspect", get(inspect_all))
        .route("/gpushare-scheduler/inspect/{node}", get(inspect_one))
        .route_layer(middleware::from_fn_with_state(shared.clone(), identified))
        // The routes below are for the kubelet and Prometheus, which have no client certificate.
        .route("/version", get(|| async { GPUSHARE_VERSION }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(|| async {
            problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "use POST for filter, prioritize, preempt, bind and mutate, and GET for all other paths",
            )
        })
        .fallback(no_such_path)
        .layer(DefaultBodyLimit::max(LARGEST_BODY))
        .with_state(shared)
}

async fn no_such_path(uri: Uri) -> Response {
    let below = uri.path().strip_prefix(admission::PATH);
    problem(
        StatusCode::NOT_FOUND,
        match below {
            Some(rest) if rest.len() > 1 && rest.starts_with('/') => {
                "this extender does not answer the API server's webhook; start it with --webhook and with TLS (Helm: extender.webhook=true)"
            }
            _ => {
                "there is no such path; filter, prioritize, preempt, bind and inspect are under /gpushare-scheduler/, and the webhook \
                 is /mutate/SCHEDULER"
            }
        },
    )
}

/// Return the router for the API server's webhook. The API server presents no client certificate. This is safe: the answer
/// reveals nothing beyond the pod in the request, and no pod is placed.
pub(crate) fn webhook(shared: Arc<ExtenderState>) -> Router {
    Router::new()
        .route(&format!("{}/{{scheduler}}", admission::PATH), post(mutate))
        .method_not_allowed_fallback(|| async { problem(StatusCode::METHOD_NOT_ALLOWED, "use POST for a review") })
        .layer(DefaultBodyLimit::max(LARGEST_REVIEW))
        .with_state(Webhook {
            shared,
            turns: Arc::new(Semaphore::new(REVIEWS)),
            large: Arc::new(Semaphore::new(1)),
        })
}

#[derive(Clone)]
struct Webhook {
    shared: Arc<ExtenderState>,
    /// Permits to read and answer reviews.
    turns: Arc<Semaphore>,
    /// The permit to parse a large review.
    large: Arc<Semaphore>,
}

/// With TLS, refuse clients that have not presented an accepted certificate. Only accepted clients may place pods or see which
/// pods exist.
async fn identified(State(shared): State<Arc<ExtenderState>>, request: Request, next: Next) -> Response {
    if is_known(&shared, request.extensions()) {
        return next.run(request).await;
    }
    let path = request.uri().path();
    let peer = request.extensions().get::<Peer>();
    let text = match peer.map(|peer| &peer.shown) {
        Some(ClientIdentity::OtherNames(why)) => {
            format!("this extender only answers clients with a known name in their certificate: {why}")
        }
        _ => {
            if shared.metrics.refused(ClientRefusal::NoCertificate) {
                tracing::warn!(
                    %path,
                    address = ?peer.map(|peer| peer.address),
                    "a client without a certificate was refused; if the client is kube-scheduler, add certData and keyData to its tlsConfig, as \
                     `divvy scheduler-config` prints them (logged once; /metrics counts all)"
                );
            }
            "this extender only answers clients that present a certificate of its CA, and this client presented none; add certData and keyData \
             to kube-scheduler's tlsConfig: divvy scheduler-config prints them"
                .to_owned()
        }
    };
    match path {
        // kube-scheduler shows this text to the user, but discards the body of any other status.
        "/gpushare-scheduler/filter" => answer(&FilterResult::error(text)),
        "/gpushare-scheduler/bind" => answer(&BindResult { error: text }),
        _ => problem(StatusCode::FORBIDDEN, &text),
    }
}

/// Report whether a client may place pods. With plain HTTP, any client that can connect may.
fn is_known(shared: &ExtenderState, request: &axum::http::Extensions) -> bool {
    shared.credentials.is_none() || request.get::<Peer>().is_some_and(|peer| peer.shown == ClientIdentity::Name)
}

async fn filter(State(shared): State<Arc<ExtenderState>>, body: Result<Bytes, BytesRejection>) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(FilterResult::error(text)).into_response()),
    };
    let response = filter_answer(&shared, &body).await;
    shared.metrics.answered("filter", began.elapsed());
    response
}

#[instrument(name = "filter", skip_all, fields(pod = Empty, uid = Empty))]
async fn filter_answer(shared: &ExtenderState, body: &[u8]) -> Response {
    let args = match wire::filter_args(body) {
        Ok(args) => args,
        Err(error) => return answer(&FilterResult::error(error)),
    };
    let annotations = args.pod.metadata.annotations.as_ref();
    let check = annotations.and_then(|all| crate::core::check_refusal(all.get(crate::core::SCHEDULER_CHECK)?));
    if let Some(text) = check {
        return answer(&FilterResult::error(text));
    }
    let pod = match convert::pod(&args.pod) {
        Ok(pod) => pod,
        Err(error) => return answer(&FilterResult::error(error)),
    };
    Span::current().record("pod", display(pod.key())).record("uid", &pod.uid);
    let ask = || shared.core().filter_at(&pod, args.nodes.names(), shared.now());
    match shared.second_look.at(ask).await {
        Ok(found) => answer(&FilterResult::new(&args.nodes, &found)),
        Err(error) => answer(&FilterResult::error(error)),
    }
}

/// Answer prioritize. The answer has no field for an error. After an error status, kube-scheduler goes on without Divvy's scores and only logs
/// the error.
async fn prioritize(State(shared): State<Arc<ExtenderState>>, body: Result<Bytes, BytesRejection>) -> Response {
    without_error_field(&shared, "prioritize", body, prioritized)
}

/// Answer preempt. The answer has no field for an error. After an error status, kube-scheduler evicts no pods and tries the pod
/// again.
async fn preempt(State(shared): State<Arc<ExtenderState>>, body: Result<Bytes, BytesRejection>) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(serde_json::json!({ "error": text })).into_response()),
    };
    let response = preempted(&shared, &body).await;
    or_status(&shared, "preempt", began, response)
}

/// The status and text of an error, for calls whose answer has no field for it.
type HttpTrouble = (StatusCode, String);

/// Answer a call whose errors are reported by the HTTP status.
fn without_error_field(
    shared: &ExtenderState,
    verb: &'static str,
    body: Result<Bytes, BytesRejection>,
    answer: impl FnOnce(&ExtenderState, &[u8]) -> Result<Response, HttpTrouble>,
) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(serde_json::json!({ "error": text })).into_response()),
    };
    or_status(shared, verb, began, answer(shared, &body))
}

fn or_status(shared: &ExtenderState, verb: &'static str, began: Instant, answer: Result<Response, HttpTrouble>) -> Response {
    let response = answer.unwrap_or_else(|(status, text)| {
        tracing::warn!(%verb, %text, "the request could not be answered");
        problem(status, &text)
    });
    shared.metrics.answered(verb, began.elapsed());
    response
}

fn unreadable(text: impl ToString) -> HttpTrouble {
    (StatusCode::BAD_REQUEST, text.to_string())
}

fn unavailable(error: NotSynced) -> HttpTrouble {
    (StatusCode::SERVICE_UNAVAILABLE, error.to_string())
}

async fn preempted(shared: &ExtenderState, body: &[u8]) -> Result<Response, HttpTrouble> {
    let (pod, mut proposed) = wire::preemption_args(body).map_err(unreadable)?;
    let pod = convert::pod(&pod).map_err(unreadable)?;
    let mut evictions = Vec::new();
    loop {
        let some = proposed.split_off(proposed.len().saturating_sub(EVICTIONS_AT_ONCE));
        evictions.extend(shared.core().preempt(&pod, some).map_err(unavailable)?);
        if proposed.is_empty() {
            break;
        }
        tokio::task::yield_now().await;
    }
    for Eviction { node, victims, .. } in &evictions {
        tracing::debug!(pod = %pod.key(), %node, ?victims, "kube-scheduler may evict these pods");
    }
    Ok(answer(&PreemptionResult::new(evictions)))
}

fn prioritized(shared: &ExtenderState, body: &[u8]) -> Result<Response, HttpTrouble> {
    let args = wire::filter_args(body).map_err(unreadable)?;
    let pod = convert::pod(&args.pod).map_err(unreadable)?;
    let scores = shared.core().prioritize(&pod, args.nodes.names()).map_err(unavailable)?;
    Ok(answer(&Priorities {
        nodes: &args.nodes,
        scores: &scores,
    }))
}

#[instrument(skip_all, fields(pod = Empty, uid = Empty))]
async fn bind(State(shared): State<Arc<ExtenderState>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(BindResult { error: text }).into_response()),
    };
    if let Some(leadership) = shared.leadership.as_ref().filter(|_| !shared.leads()) {
        let response = handed_on(&shared, leadership, headers.contains_key(FORWARDED), body).await;
        shared.metrics.answered("bind_handed_on", began.elapsed());
        return response;
    }
    let refusal = match wire::bind_args(&body) {
        Ok(args) => {
            let pod = format!("{}/{}", args.pod_namespace, args.pod_name);
            Span::current().record("pod", pod).record("uid", &args.pod_uid);
            shared.bind(args).await.err().map(|error| error.message())
        }
        Err(error) => Some(error.to_string()),
    };
    if let Some(text) = &refusal {
        tracing::info!(%text, "bind refused");
    }
    shared.metrics.answered("bind", began.elapsed());
    answer(&BindResult {
        error: refusal.unwrap_or_default(),
    })
}

/// Forward a bind to the leader, because only the leader binds. `once_already` means that another replica has already forwarded
/// the bind to this one.
async fn handed_on(shared: &ExtenderState, leadership: &Leadership, once_already: bool, body: Bytes) -> Response {
    let refuse = |error: String| {
        tracing::info!(%error, "a bind was not forwarded to the leader");
        answer(&BindResult { error })
    };
    let holder = shared.holder().filter(|holder| *holder != leadership.identity);
    let Some(holder) = holder else {
        return refuse(match shared.lease_trouble() {
            Some(why) => {
                format!("no replica of Divvy's extender is known to lead, because the lease cannot be read or written: {why}")
            }
            None => "no replica of Divvy's extender leads at the moment; one takes over within 20 s, and the bind is tried again"
                .to_owned(),
        });
    };
    let Some(address) = lease::address_of(&holder).filter(|_| !once_already) else {
        return refuse(format!(
            "this replica of Divvy's extender is not the leader, {holder} is; the bind is tried again"
        ));
    };
    match leadership.forward.bind(address, &leadership.identity, body).await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(why) => refuse(format!(
            "this replica of Divvy's extender is not the leader, and the leader {holder} could not be reached: {why}; if the leader is gone, \
             another replica takes over within 20 s, and the bind is tried again"
        )),
    }
}

async fn inspect_all(State(shared): State<Arc<ExtenderState>>) -> Response {
    let began = Instant::now();
    let report = inspect::all(shared.core().index().ledger());
    shared.metrics.answered("inspect", began.elapsed());
    answer(&report)
}

async fn inspect_one(State(shared): State<Arc<ExtenderState>>, Path(node): Path<String>) -> Response {
    let began = Instant::now();
    let report = inspect::one(shared.core().index().ledger(), &node);
    shared.metrics.answered("inspect", began.elapsed());
    answer(&report)
}

/// Answer a review. This needs neither the ledger nor the lease, so any replica answers as soon as it has started. The body is
/// not read before the review has its turn; this limits the memory.
async fn mutate(State(webhook): State<Webhook>, Path(scheduler): Path<String>, request: Request) -> Response {
    let began = Instant::now();
    if let Err(error) = admission::check_scheduler_name(&scheduler) {
        return problem(StatusCode::BAD_REQUEST, &error.to_string());
    }
    let Ok(Ok(_turn)) = tokio::time::timeout(REVIEW_TURN, webhook.turns.acquire()).await else {
        return problem(
            StatusCode::SERVICE_UNAVAILABLE,
            &format!(
                "{REVIEWS} other reviews are being answered, and none has finished within {REVIEW_TURN:?}; send the review again"
            ),
        );
    };
    let body = match tokio::time::timeout(REVIEW_BODY, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let text = format!(
                "the review is larger than {} MiB, but no pod is that large",
                LARGEST_REVIEW >> 20
            );
            return problem(StatusCode::PAYLOAD_TOO_LARGE, &text);
        }
        Ok(Err(rejection)) => return problem(rejection.status(), &format!("the review could not be read: {rejection}")),
        Err(_elapsed) => {
            let text = format!("the review did not arrive within {REVIEW_BODY:?}; send the review again");
            return problem(StatusCode::REQUEST_TIMEOUT, &text);
        }
    };
    let reviewed = if body.len() <= SMALL_REVIEW {
        Ok(admission::review(&body, &scheduler))
    } else {
        let turn = webhook.large.clone().acquire_owned().await;
        let scheduler = scheduler.clone();
        tokio::task::spawn_blocking(move || {
            // Keep the permit until the work is done, even after the caller has disconnected.
            let _turn = turn;
            admission::review(&body, &scheduler)
        })
        .await
    };
    let response = match reviewed {
        Ok(Ok(review)) => {
            tracing::debug!(given = review.gives(), %scheduler, "a new pod was reviewed");
            answer(&review)
        }
        Ok(Err(error)) => problem(StatusCode::BAD_REQUEST, &error.to_string()),
        Err(panicked) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("the review could not be answered: {panicked}"),
        ),
    };
    webhook.shared.metrics.answered("mutate", began.elapsed());
    response
}

/// Answer `/readyz`. Error texts of the API server are only shown to known callers; the log has them as well.
async fn ready(State(shared): State<Arc<ExtenderState>>, request: axum::http::Extensions) -> Response {
    let known = is_known(&shared, &request);
    let core = shared.core();
    let line = |what: &str, feed: &Feed| {
        let listed = if feed.lists > 0 { "listed" } else { "not listed yet" };
        let trouble = match &feed.trouble {
            Some(why) if known => format!("; the watch is broken: {why}"),
            Some(_) => "; the watch is broken".to_owned(),
            None => String::new(),
        };
        format!("{what}: {listed}{trouble}\n")
    };
    let lead = match (&shared.leadership, shared.holder()) {
        (None, _) => String::new(),
        (Some(_), _) if shared.leads() => "lease: this replica leads\n".to_owned(),
        (Some(_), Some(holder)) => format!("lease: {holder} leads\n"),
        (Some(_), None) => match shared.lease_trouble() {
            Some(why) if known => format!("lease: cannot be read or written: {why}\n"),
            Some(_) => "lease: cannot be read or written\n".to_owned(),
            None => "lease: no replica leads\n".to_owned(),
        },
    };
    // A replica that does not lead is also ready: it filters, and forwards binds.
    let text = line("pods", core.index().pods()) + &line("nodes", core.index().nodes()) + &lead;
    // A watch that breaks later is resumed; until then the extender answers from the last events.
    // If the lease cannot be read, nothing will ever be bound. Fail readiness, so that the administrator notices at installation
    // and not with the first pod.
    let of_no_use = shared.holder().is_none() && shared.lease_trouble().is_some();
    let status = if core.index().synced() && !of_no_use {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, text).into_response()
}

async fn metrics(State(shared): State<Arc<ExtenderState>>, headers: HeaderMap) -> Response {
    let accept = headers.get_all(header::ACCEPT).iter();
    let format = MetricsFormat::negotiate(accept.filter_map(|value| value.to_str().ok()));
    let certificate_ends_s = shared
        .credentials
        .as_ref()
        .map(|current| current.borrow().as_ref().map_or(0, |credentials| credentials.not_after_s));
    let scrape = Scrape::of(&shared.core(), certificate_ends_s, shared.leads());
    let text = shared.metrics.text(&scrape, format);
    ([(header::CONTENT_TYPE, format.content_type())], text).into_response()
}

fn answer(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(error) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("the answer could not be written: {error}"),
        ),
    }
}

fn too_large(rejection: &BytesRejection, say: impl FnOnce(String) -> Response) -> Response {
    let status = rejection.status();
    let text = if status == StatusCode::PAYLOAD_TOO_LARGE {
        format!(
            "the request is larger than {} MiB; set nodeCacheCapable: true in kube-scheduler's extender configuration, so that it sends names",
            LARGEST_BODY >> 20
        )
    } else {
        format!("the request could not be read: {rejection}")
    };
    (status, say(text)).into_response()
}

fn problem(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}
