//! kube-scheduler's extender protocol under gpushare's paths (research/gpushare.md section 3, research/k8s-seams.md
//! section 2), what people and Prometheus ask for, and the API server's webhook ([`crate::admission`]).
//!
//! Errors of filter and bind are answered with HTTP 200 and `Error` in the body, since kube-scheduler throws the body of any
//! other status away and the user would never see the reason.

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
use divvy_kube::convert;
use divvy_serve::{Limits, Share};
use serde::Serialize;
use tokio::sync::Semaphore;

use crate::admission;
use crate::core::{EVICTIONS_AT_ONCE, Eviction};
use crate::forward::FORWARDED;
use crate::host::{Leadership, Shared};
use crate::lease;
use crate::metrics::{Refused, Seen};
use crate::tls::listener::{Peer, Shown};
use wire::{BindResult, FilterResult, PreemptionResult, Priorities};

/// What gpushare's extender answers to `/version`, to the byte: tools compare it.
const GPUSHARE_VERSION: &str = "0.1.0";

/// A filter request with whole Node objects of 5,000 nodes is about 40 MiB.
const LARGEST_BODY: usize = 64 << 20;

/// An API server reads at most 3 MiB of a request, and etcd keeps objects of at most 1.5 MiB; a review of a new pod contains it once.
const LARGEST_REVIEW: usize = 3 << 20;

/// Reviews that are read and answered at once: with [`LARGEST_REVIEW`], twice while it is put together, 48 MiB at most.
const REVIEWS: usize = 8;
/// For a review to get its turn, and to be read: together the 3 s that the API server waits (`timeoutSeconds` of the webhook that
/// `divvy scheduler-config` prints).
const REVIEW_TURN: Duration = Duration::from_secs(2);
const REVIEW_BODY: Duration = Duration::from_secs(1);

/// A review up to this size is answered at once: a pod has some kilobytes. Larger ones are read on another thread, one at a time, so that neither
/// kube-scheduler nor a probe waits for them.
const SMALL_REVIEW: usize = 64 << 10;

/// A caller without a certificate asks for a page, unless it asks for a review.
const LARGEST_QUESTION: usize = 4 << 10;

/// What the server grants its callers. `tls`: they may show a certificate, and who does not is unknown; without, everybody is known: who can
/// connect may place pods, and so `--listen` is the loopback address.
pub(crate) fn limits(tls: bool, webhook: bool) -> Limits {
    const CONNECTIONS: usize = 256;
    const UNKNOWN: usize = 32;
    let known = if tls { CONNECTIONS - UNKNOWN } else { CONNECTIONS };
    Limits {
        known: Share {
            connections: known,
            per_address: known,
            // Longer than Go's http.Transport keeps an idle connection (90 s), so that it is kube-scheduler that closes it. A bind that is sent
            // while the server closes would be lost, and tried again after a back-off only.
            idle: Duration::from_secs(100),
            body_bytes: LARGEST_BODY,
        },
        unknown: Share {
            connections: UNKNOWN,
            // One address cannot have them all; an API server that has many pods reviewed at once has enough.
            per_address: UNKNOWN / 2,
            idle: Duration::from_secs(90),
            body_bytes: if webhook { LARGEST_REVIEW } else { LARGEST_QUESTION },
        },
        handshakes: 256,
        handshakes_per_address: 64,
        first_byte: Duration::from_secs(1),
        handshake: Duration::from_secs(5),
        header: Duration::from_secs(5),
        // kube-scheduler waits for 5 s at most (httpTimeout) for all of a call.
        body: Duration::from_secs(10),
        request: Duration::from_secs(30),
        header_bytes: 64 << 10,
        // One body of the largest size, and then some.
        bodies_bytes: 96 << 20,
    }
}

pub(crate) fn router(shared: Arc<Shared>) -> Router {
    Router::new()
        .route("/gpushare-scheduler/filter", post(filter))
        .route("/gpushare-scheduler/prioritize", post(prioritize))
        .route("/gpushare-scheduler/preempt", post(preempt))
        .route("/gpushare-scheduler/bind", post(bind))
        .route("/gpushare-scheduler/inspect", get(inspect_all))
        .route("/gpushare-scheduler/inspect/{node}", get(inspect_one))
        .route_layer(middleware::from_fn_with_state(shared.clone(), identified))
        // From here on: what the kubelet and Prometheus ask, which have no certificate of ours.
        .route("/version", get(|| async { GPUSHARE_VERSION }))
        .route("/healthz", get(|| async { "ok" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .method_not_allowed_fallback(|| async {
            problem(
                StatusCode::METHOD_NOT_ALLOWED,
                "filter, prioritize, preempt, bind and mutate are POST, the rest is GET",
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
                "there is no such path; filter, prioritize, preempt, bind and inspect are under /gpushare-scheduler/, the webhook is /mutate/ and a scheduler's name"
            }
        },
    )
}

/// What the API server asks, which has no certificate of ours either. It names no pod that the client has not named itself, and places none.
pub(crate) fn webhook(shared: Arc<Shared>) -> Router {
    Router::new()
        .route(&format!("{}/{{scheduler}}", admission::PATH), post(mutate))
        .method_not_allowed_fallback(|| async { problem(StatusCode::METHOD_NOT_ALLOWED, "a review is POST") })
        .layer(DefaultBodyLimit::max(LARGEST_REVIEW))
        .with_state(Webhook {
            shared,
            turns: Arc::new(Semaphore::new(REVIEWS)),
            large: Arc::new(Semaphore::new(1)),
        })
}

#[derive(Clone)]
struct Webhook {
    shared: Arc<Shared>,
    /// To read a review and answer it.
    turns: Arc<Semaphore>,
    /// To take a large one apart.
    large: Arc<Semaphore>,
}

/// With TLS, only a client that has shown a certificate may have pods placed, or see whose they are.
async fn identified(State(shared): State<Arc<Shared>>, request: Request, next: Next) -> Response {
    if is_known(&shared, request.extensions()) {
        return next.run(request).await;
    }
    let path = request.uri().path();
    let peer = request.extensions().get::<Peer>();
    let text = match peer.map(|peer| &peer.shown) {
        Some(Shown::OtherNames(why)) => {
            format!("this extender answers only clients that it knows by the name in their certificate: {why}")
        }
        _ => {
            if shared.metrics.refused(Refused::NoCertificate) {
                tracing::warn!(
                    %path,
                    address = ?peer.map(|peer| peer.address),
                    "a client without a certificate was refused; if it is kube-scheduler, its tlsConfig needs certData and keyData, and \
                     `divvy scheduler-config` prints them (said once; /metrics counts)"
                );
            }
            "this extender answers only clients that show a certificate of its authority, and this one showed none; kube-scheduler's tlsConfig \
             needs certData and keyData: divvy scheduler-config prints them"
                .to_owned()
        }
    };
    match path {
        // kube-scheduler shows the text to the user, and throws away the body of any other status.
        "/gpushare-scheduler/filter" => answer(&FilterResult::error(text)),
        "/gpushare-scheduler/bind" => answer(&BindResult { error: text }),
        _ => problem(StatusCode::FORBIDDEN, &text),
    }
}

/// Whether it may have pods placed: in plain HTTP, everybody who can connect.
fn is_known(shared: &Shared, request: &axum::http::Extensions) -> bool {
    shared.credentials.is_none() || request.get::<Peer>().is_some_and(|peer| peer.shown == Shown::Name)
}

async fn filter(State(shared): State<Arc<Shared>>, body: Result<Bytes, BytesRejection>) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(FilterResult::error(text)).into_response()),
    };
    let response = filter_answer(&shared, &body).await;
    shared.metrics.answered("filter", began.elapsed());
    response
}

async fn filter_answer(shared: &Shared, body: &[u8]) -> Response {
    let args = match wire::filter_args(body) {
        Ok(args) => args,
        Err(text) => return answer(&FilterResult::error(text)),
    };
    let annotations = args.pod.metadata.annotations.as_ref();
    let check = annotations.and_then(|all| crate::core::check_refusal(all.get(crate::core::SCHEDULER_CHECK)?));
    if let Some(text) = check {
        return answer(&FilterResult::error(text));
    }
    let pod = match convert::pod(&args.pod) {
        Ok(pod) => pod,
        Err(error) => return answer(&FilterResult::error(error.to_string())),
    };
    let ask = || shared.core().filter_at(&pod, args.nodes.names(), shared.now());
    match shared.second_look.at(ask).await {
        Ok(found) => answer(&FilterResult::new(&args.nodes, &found)),
        Err(text) => answer(&FilterResult::error(text)),
    }
}

/// There is no place for an error in the answer; kube-scheduler goes on without our scores, and says so in its log only.
async fn prioritize(State(shared): State<Arc<Shared>>, body: Result<Bytes, BytesRejection>) -> Response {
    without_error_field(&shared, "prioritize", body, prioritized)
}

/// Nor is there one here; kube-scheduler evicts nobody then, and tries the pod again.
async fn preempt(State(shared): State<Arc<Shared>>, body: Result<Bytes, BytesRejection>) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(serde_json::json!({ "error": text })).into_response()),
    };
    let response = preempted(&shared, &body).await;
    or_status(&shared, "preempt", began, response)
}

/// Why a call has no answer.
type Trouble = (StatusCode, String);

/// Errors are told by the status.
fn without_error_field(
    shared: &Shared,
    verb: &'static str,
    body: Result<Bytes, BytesRejection>,
    answer: impl FnOnce(&Shared, &[u8]) -> Result<Response, Trouble>,
) -> Response {
    let began = Instant::now();
    let body = match body {
        Ok(body) => body,
        Err(rejection) => return too_large(&rejection, |text| Json(serde_json::json!({ "error": text })).into_response()),
    };
    or_status(shared, verb, began, answer(shared, &body))
}

fn or_status(shared: &Shared, verb: &'static str, began: Instant, answer: Result<Response, Trouble>) -> Response {
    let response = answer.unwrap_or_else(|(status, text)| {
        tracing::warn!(%verb, %text, "no answer");
        problem(status, &text)
    });
    shared.metrics.answered(verb, began.elapsed());
    response
}

fn unreadable(text: impl ToString) -> Trouble {
    (StatusCode::BAD_REQUEST, text.to_string())
}

fn unavailable(text: String) -> Trouble {
    (StatusCode::SERVICE_UNAVAILABLE, text)
}

async fn preempted(shared: &Shared, body: &[u8]) -> Result<Response, Trouble> {
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
        tracing::debug!(pod = %pod.key(), %node, ?victims, "kube-scheduler may evict these");
    }
    Ok(answer(&PreemptionResult::new(evictions)))
}

fn prioritized(shared: &Shared, body: &[u8]) -> Result<Response, Trouble> {
    let args = wire::filter_args(body).map_err(unreadable)?;
    let pod = convert::pod(&args.pod).map_err(unreadable)?;
    let scores = shared.core().prioritize(&pod, args.nodes.names()).map_err(unavailable)?;
    Ok(answer(&Priorities {
        nodes: &args.nodes,
        scores: &scores,
    }))
}

async fn bind(State(shared): State<Arc<Shared>>, headers: HeaderMap, body: Result<Bytes, BytesRejection>) -> Response {
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
    let outcome = match wire::bind_args(&body) {
        Ok(args) => shared.bind(args).await,
        Err(text) => Err(text),
    };
    if let Err(text) = &outcome {
        tracing::info!(%text, "bind refused");
    }
    shared.metrics.answered("bind", began.elapsed());
    answer(&BindResult {
        error: outcome.err().unwrap_or_default(),
    })
}

/// Only the leader binds.
async fn handed_on(shared: &Shared, leadership: &Leadership, once_already: bool, body: Bytes) -> Response {
    let refuse = |error: String| {
        tracing::info!(%error, "a bind was not handed on");
        answer(&BindResult { error })
    };
    let holder = shared.holder().filter(|holder| *holder != leadership.identity);
    let Some(holder) = holder else {
        return refuse(match shared.lease_trouble() {
            Some(why) => format!("no replica of Divvy's extender is known to lead, as the lease cannot be had: {why}"),
            None => {
                "no replica of Divvy's extender leads at this moment; another takes over within 20 s, and the bind is tried again"
                    .to_owned()
            }
        });
    };
    let Some(address) = lease::address_of(&holder).filter(|_| !once_already) else {
        return refuse(format!(
            "this replica of Divvy's extender does not lead, {holder} does; the bind is tried again"
        ));
    };
    match leadership.forward.bind(address, &leadership.identity, body).await {
        Ok(body) => ([(header::CONTENT_TYPE, "application/json")], body).into_response(),
        Err(why) => refuse(format!(
            "this replica of Divvy's extender does not lead, and {holder}, which does, could not be asked: {why}; another takes over within 20 s \
             if that one is gone, and the bind is tried again"
        )),
    }
}

async fn inspect_all(State(shared): State<Arc<Shared>>) -> Response {
    let began = Instant::now();
    let report = inspect::all(shared.core().index().ledger());
    shared.metrics.answered("inspect", began.elapsed());
    answer(&report)
}

async fn inspect_one(State(shared): State<Arc<Shared>>, Path(node): Path<String>) -> Response {
    let began = Instant::now();
    let report = inspect::one(shared.core().index().ledger(), &node);
    shared.metrics.answered("inspect", began.elapsed());
    answer(&report)
}

/// It needs no ledger and no lease: any replica answers, from its first moment on. No byte of the review is read before there is memory for it.
async fn mutate(State(webhook): State<Webhook>, Path(scheduler): Path<String>, request: Request) -> Response {
    let began = Instant::now();
    if let Err(why) = admission::check_scheduler_name(&scheduler) {
        return problem(StatusCode::BAD_REQUEST, &why);
    }
    let Ok(Ok(_turn)) = tokio::time::timeout(REVIEW_TURN, webhook.turns.acquire()).await else {
        return problem(
            StatusCode::SERVICE_UNAVAILABLE,
            &format!("{REVIEWS} other reviews are being answered, and none has ended within {REVIEW_TURN:?}; send it again"),
        );
    };
    let body = match tokio::time::timeout(REVIEW_BODY, Bytes::from_request(request, &())).await {
        Ok(Ok(body)) => body,
        Ok(Err(rejection)) if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE => {
            let text = format!("the review is larger than {} MiB, which no pod is", LARGEST_REVIEW >> 20);
            return problem(StatusCode::PAYLOAD_TOO_LARGE, &text);
        }
        Ok(Err(rejection)) => return problem(rejection.status(), &format!("the review could not be read: {rejection}")),
        Err(_elapsed) => {
            let text = format!("the review did not arrive within {REVIEW_BODY:?}; send it again");
            return problem(StatusCode::REQUEST_TIMEOUT, &text);
        }
    };
    let reviewed = if body.len() <= SMALL_REVIEW {
        Ok(admission::review(&body, &scheduler))
    } else {
        let turn = webhook.large.clone().acquire_owned().await;
        let scheduler = scheduler.clone();
        tokio::task::spawn_blocking(move || {
            // It is kept until the work is done, also when the caller has gone away.
            let _turn = turn;
            admission::review(&body, &scheduler)
        })
        .await
    };
    let response = match reviewed {
        Ok(Ok(review)) => {
            tracing::debug!(given = review.gives(), %scheduler, "a new pod was looked at");
            answer(&review)
        }
        Ok(Err(why)) => problem(StatusCode::BAD_REQUEST, &why),
        Err(panicked) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("the review could not be answered: {panicked}"),
        ),
    };
    webhook.shared.metrics.answered("mutate", began.elapsed());
    response
}

/// The API server's words are for callers that are known, and for the log.
async fn ready(State(shared): State<Arc<Shared>>, request: axum::http::Extensions) -> Response {
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
            Some(why) if known => format!("lease: cannot be had: {why}\n"),
            Some(_) => "lease: cannot be had\n".to_owned(),
            None => "lease: nobody leads\n".to_owned(),
        },
    };
    // Who does not lead is ready, too: it filters, and hands binds on.
    let text = line("pods", core.index().pods()) + &line("nodes", core.index().nodes()) + &lead;
    // A watch that broke later is taken up again; what is known meanwhile is as good as the last event.
    // Without a lease that can be read nobody will ever bind here: better seen at the installation than by the first pod.
    let of_no_use = shared.holder().is_none() && shared.lease_trouble().is_some();
    let status = if core.index().synced() && !of_no_use {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (status, text).into_response()
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let certificate_ends_s = shared
        .credentials
        .as_ref()
        .map(|current| current.borrow().as_ref().map_or(0, |credentials| credentials.not_after_s));
    let seen = Seen::of(&shared.core(), certificate_ends_s, shared.leads());
    match shared.metrics.text(&seen) {
        Ok(text) => (
            [(
                header::CONTENT_TYPE,
                "application/openmetrics-text; version=1.0.0; charset=utf-8",
            )],
            text,
        )
            .into_response(),
        Err(error) => problem(
            StatusCode::INTERNAL_SERVER_ERROR,
            &format!("the metrics could not be written: {error}"),
        ),
    }
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
