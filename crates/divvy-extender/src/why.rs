//! `divvy why` for users who may not list nodes and pods: what keeps a pod from starting, told to whoever may read that pod.
//!
//! - `caller`: who asks, and what it may see (TokenReview, SubjectAccessReview)
//! - `sight`: looks at the cluster, one at a time and shared by those who ask
//! - `tunnel`: TLS within the API server's service proxy
//! - `publish`: the authority's certificate, by which clients know this program
//!
//! Any replica answers, since nothing is decided. What is in the way of scheduling is on another path: a question holds nothing that a filter waits
//! for, and at most [`ANSWERS`] are answered at once.

mod caller;
mod publish;
mod sight;
mod tunnel;

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use divvy_cluster::explain::{ALL_NODES, PATH};
use divvy_cluster::{list, sites};
use divvy_model::{MemoryUnit, PodKey};
use divvy_why::{Answer, Named, Wants};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;

use crate::core::answer;
use crate::http::problem;
use crate::metrics::Metrics;
use crate::tls::Current;

use caller::Caller;
pub(crate) use publish::keep as publish;
use sight::Sight;
use tunnel::Tunnels;

/// Questions that are answered at once, from the token to the last byte of the answer: one about all of 5,000 nodes has some megabytes.
const ANSWERS: usize = 8;
/// How long a question waits for others.
const TURN: Duration = Duration::from_secs(5);
/// Service account tokens have one or two kilobytes, those of identity providers up to eight.
const LONGEST_TOKEN: usize = 16 << 10;
/// What a pod's own rules may have together: they are compared with each node. A pod that Kubernetes takes may have a megabyte.
const LARGEST_RULES: usize = 16 << 10;
/// Claims of volumes that are looked at, one request each or three.
const MOST_CLAIMS: usize = 32;
/// Of an answer's body at once.
const CHUNK: usize = 64 << 10;

/// Where questions are answered.
struct Desk {
    client: kube::Client,
    metrics: Arc<Metrics>,
    sight: Arc<Sight>,
    answers: Arc<Semaphore>,
}

/// Why there is no answer.
#[derive(Debug)]
struct Refusal {
    status: StatusCode,
    text: String,
}

impl Refusal {
    fn new(status: StatusCode, text: impl Into<String>) -> Refusal {
        Refusal {
            status,
            text: text.into(),
        }
    }

    fn unavailable(text: impl Into<String>) -> Refusal {
        Refusal::new(StatusCode::SERVICE_UNAVAILABLE, text)
    }
}

/// `GET /why/NAMESPACE/POD`, and `GET /why` with an upgrade, within which the same is asked.
pub(crate) fn router(
    client: kube::Client,
    unit: MemoryUnit,
    metrics: Arc<Metrics>,
    credentials: Current,
    stop: CancellationToken,
) -> Router {
    let desk = Arc::new(Desk {
        sight: Arc::new(Sight::new(client.clone(), unit)),
        client,
        metrics,
        answers: Arc::new(Semaphore::new(ANSWERS)),
    });
    let questions = Router::new()
        .route(&format!("{PATH}/{{namespace}}/{{pod}}"), get(ask))
        .method_not_allowed_fallback(|| async { problem(StatusCode::METHOD_NOT_ALLOWED, "a question is GET") })
        .with_state(desk);
    let tunnels = Tunnels::new(credentials, questions.clone(), stop);
    questions.merge(Router::new().route(PATH, get(tunnel::open)).with_state(tunnels))
}

async fn ask(
    State(desk): State<Arc<Desk>>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let began = Instant::now();
    let all_nodes = query.is_some_and(|query| query.split('&').any(|part| part == ALL_NODES));
    let pod = PodKey { namespace, name };
    let response = match desk.answer(&pod, all_nodes, &headers).await {
        Ok(response) => response,
        Err(refusal) => {
            tracing::debug!(%pod, status = %refusal.status, text = %refusal.text, "no answer to why");
            let mut response = problem(refusal.status, &refusal.text);
            if refusal.status == StatusCode::UNAUTHORIZED {
                response
                    .headers_mut()
                    .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            response
        }
    };
    desk.metrics.answered("why", began.elapsed());
    response
}

impl Desk {
    async fn answer(&self, pod: &PodKey, all_nodes: bool, headers: &HeaderMap) -> Result<Response, Refusal> {
        // Before anything is asked: both become parts of paths.
        answer::path(pod).map_err(|text| Refusal::new(StatusCode::BAD_REQUEST, text))?;
        let token = bearer(headers)?;
        let turn = tokio::time::timeout(TURN, self.answers.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            let text = format!("{ANSWERS} other questions are being answered; ask again in some seconds");
            return Err(Refusal::unavailable(text));
        };
        let caller = Caller::of(&self.client, token).await?;
        if !caller.may("get", &pod.namespace, &pod.name).await? {
            let text = format!("{} may not get pod {pod}", caller.name());
            return Err(Refusal::new(StatusCode::FORBIDDEN, text));
        }
        let named = self.named(&caller, &pod.namespace).await?;
        let wants = self.wants(pod).await?;
        let found = self.sight.answer(wants, all_nodes, named).await?;
        json(&found, turn)
    }

    async fn named(&self, caller: &Caller<'_>, namespace: &str) -> Result<Named, Refusal> {
        Ok(if caller.may("list", "", "").await? {
            Named::All
        } else if caller.may("list", namespace, "").await? {
            Named::Of(namespace.to_owned())
        } else {
            Named::None
        })
    }

    async fn wants(&self, pod: &PodKey) -> Result<Wants, Refusal> {
        let object = list::pod(&self.client, &pod.namespace, &pod.name).await.map_err(|error| {
            let status = match error.is_not_found() {
                true => StatusCode::NOT_FOUND,
                false => StatusCode::SERVICE_UNAVAILABLE,
            };
            Refusal::new(status, error.to_string())
        })?;
        let mut wants = sites::wants(&object)
            .map_err(|error| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, format!("pod {pod}: {error}")))?;
        if wants.rules_bytes() > LARGEST_RULES || wants.claims.len() > MOST_CLAIMS {
            let text = format!(
                "pod {pod} has more rules for nodes and other pods than {} KiB, or more than {MOST_CLAIMS} volume claims; the extender does not \
                 compare that with each node for others. Whoever may list nodes and pods can: divvy why",
                LARGEST_RULES >> 10
            );
            return Err(Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        list::look_at_claims(&self.client, &mut wants).await;
        Ok(wants)
    }
}

fn bearer(headers: &HeaderMap) -> Result<&str, Refusal> {
    let refused = |text: &str| Refusal::new(StatusCode::UNAUTHORIZED, text);
    let header = headers.get(header::AUTHORIZATION).ok_or_else(|| {
        refused(
            "a question needs the user's token (Authorization: Bearer …). The API server's service proxy passes none on: `divvy why` asks through a \
             connection of its own within it",
        )
    })?;
    let text = header.to_str().unwrap_or_default();
    let token = text
        .get(..7)
        .filter(|scheme| scheme.eq_ignore_ascii_case("bearer "))
        .and_then(|_| text.get(7..));
    let token = token.unwrap_or_default().trim();
    if token.is_empty() || token.len() > LONGEST_TOKEN {
        return Err(refused("the header Authorization holds no token of a Kubernetes user"));
    }
    Ok(token)
}

/// The answer, piece by piece. Its turn ends when the last piece is taken, so that slow readers are few.
fn json(answer: &Answer, turn: OwnedSemaphorePermit) -> Result<Response, Refusal> {
    let body = serde_json::to_vec(answer).map_err(|error| {
        Refusal::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            format!("the answer could not be written: {error}"),
        )
    })?;
    let length = body.len();
    let pieces = futures::stream::unfold((Bytes::from(body), turn), |(mut rest, turn)| async move {
        let piece = rest.split_to(rest.len().min(CHUNK));
        (!piece.is_empty()).then(|| (Ok::<Bytes, std::convert::Infallible>(piece), (rest, turn)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CONTENT_LENGTH, HeaderValue::from(length)),
    ];
    Ok((headers, Body::from_stream(pieces)).into_response())
}
