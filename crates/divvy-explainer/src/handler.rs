//! Handles one question, from the user's token to the answer.

use std::sync::Arc;
use std::time::Duration;

use crate::service_proxy::{ALL_NODES, PATH};
use axum::body::{Body, Bytes};
use axum::extract::{Path, RawQuery, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use axum::routing::get;
use axum::{Json, Router};
use divvy_kube::caller::Caller;
use divvy_kube::list;
use divvy_model::{MemoryUnit, PodKey, names};
use divvy_why::{NamedPods, Wants};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::metrics::ExplainerMetrics;
use crate::refusal::AnswerRefusal;
use crate::snapshot_cache::{SnapshotCache, WhyQuestion};
use crate::{from_objects, related};

/// The maximum number of questions that are answered at the same time. A question counts from the check of its token until the
/// last byte of its answer is sent.
const ANSWERS: usize = 8;
/// How long a question waits for its turn.
const TURN: Duration = Duration::from_secs(5);
/// The maximum size in bytes of a token. Service account tokens have one or two kilobytes, tokens of identity providers up to
/// eight.
const LONGEST_TOKEN: usize = 16 << 10;
/// The maximum size in bytes of a pod's rules. They are compared with each node and each pod, and Kubernetes accepts pods with a
/// megabyte of rules.
const LARGEST_RULES: usize = 16 << 10;
/// The maximum number of volume claims of a pod. Reading a claim takes one to three requests.
const MOST_CLAIMS: usize = 32;
/// The number of bytes of an answer's body that are sent at once.
const CHUNK: usize = 64 << 10;

/// The handler of questions.
pub(crate) struct Handler {
    client: kube::Client,
    metrics: Arc<ExplainerMetrics>,
    cache: Arc<SnapshotCache>,
    answers: Arc<Semaphore>,
}

pub(crate) fn problem(status: StatusCode, text: &str) -> Response {
    (status, Json(serde_json::json!({ "error": text }))).into_response()
}

impl Handler {
    /// Return the router for `GET /why/NAMESPACE/POD`, with the user's token in `Authorization`.
    pub(crate) fn router(client: kube::Client, unit: MemoryUnit, metrics: Arc<ExplainerMetrics>) -> Router {
        let handler = Arc::new(Handler {
            cache: Arc::new(SnapshotCache::new(client.clone(), unit, metrics.clone())),
            client,
            metrics,
            answers: Arc::new(Semaphore::new(ANSWERS)),
        });
        Router::new()
            .route(&format!("{PATH}/{{namespace}}/{{pod}}"), get(ask))
            .method_not_allowed_fallback(|| async { problem(StatusCode::METHOD_NOT_ALLOWED, "use GET for a question") })
            .fallback(|| async {
                problem(
                    StatusCode::NOT_FOUND,
                    "there is no such path; send questions as GET /why/NAMESPACE/POD",
                )
            })
            .with_state(handler)
    }

    async fn answer(&self, pod: &PodKey, all_nodes: bool, headers: &HeaderMap) -> Result<Response, AnswerRefusal> {
        // Check the names before they become part of URL paths.
        if !names::is_name(&pod.namespace) || !names::is_name(&pod.name) {
            let text = "write the namespace and the name of the pod with lower-case letters, digits, - and .";
            return Err(AnswerRefusal::new(StatusCode::BAD_REQUEST, text));
        }
        let token = bearer(headers)?;
        let turn = tokio::time::timeout(TURN, self.answers.clone().acquire_owned()).await;
        let Ok(Ok(turn)) = turn else {
            let text = format!("{ANSWERS} other questions are being answered; try again in a few seconds");
            return Err(AnswerRefusal::unavailable(text));
        };
        let caller = Caller::of(&self.client, token).await.map_err(unchecked)?.ok_or_else(|| {
            let text = "the API server does not accept the token; it may have expired";
            AnswerRefusal::new(StatusCode::UNAUTHORIZED, text)
        })?;
        if !self.may(&caller, "get", &pod.namespace, &pod.name).await? {
            let text = format!("{} may not get pod {pod}", caller.name());
            return Err(AnswerRefusal::new(StatusCode::FORBIDDEN, text));
        }
        let question = WhyQuestion {
            named: self.named(&caller, &pod.namespace).await?,
            wants: self.wants(pod).await?,
            all_nodes,
        };
        let (body, turn) = self.cache.answer(question, turn).await?;
        Ok(json(body, turn))
    }

    async fn may(&self, caller: &Caller, verb: &str, namespace: &str, name: &str) -> Result<bool, AnswerRefusal> {
        let may = caller.may(&self.client, verb, "pods", namespace, name).await;
        may.map_err(unchecked)
    }

    async fn named(&self, caller: &Caller, namespace: &str) -> Result<NamedPods, AnswerRefusal> {
        Ok(if self.may(caller, "list", "", "").await? {
            NamedPods::All
        } else if self.may(caller, "list", namespace, "").await? {
            NamedPods::Of(namespace.to_owned())
        } else {
            NamedPods::None
        })
    }

    async fn wants(&self, pod: &PodKey) -> Result<Wants, AnswerRefusal> {
        let object = list::pod(&self.client, &pod.namespace, &pod.name).await.map_err(|error| {
            let status = if error.is_not_found() {
                StatusCode::NOT_FOUND
            } else {
                StatusCode::SERVICE_UNAVAILABLE
            };
            AnswerRefusal::new(status, error.to_string())
        })?;
        let mut wants = from_objects::wants(&object)
            .map_err(|error| AnswerRefusal::new(StatusCode::UNPROCESSABLE_ENTITY, format!("pod {pod}: {error}")))?;
        if wants.rules_bytes() > LARGEST_RULES || wants.claims.len() > MOST_CLAIMS {
            let text = format!(
                "pod {pod} has more than {} KiB of rules for nodes and other pods, or more than {MOST_CLAIMS} volume claims, which exceeds the \
                 explainer's limits. A user who may list nodes and pods can run `divvy why` without these limits",
                LARGEST_RULES >> 10
            );
            return Err(AnswerRefusal::new(StatusCode::UNPROCESSABLE_ENTITY, text));
        }
        related::read_claims(&self.client, &mut wants).await;
        Ok(wants)
    }
}

async fn ask(
    State(handler): State<Arc<Handler>>,
    Path((namespace, name)): Path<(String, String)>,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Response {
    let all_nodes = query.is_some_and(|query| query.split('&').any(|part| part == ALL_NODES));
    let pod = PodKey { namespace, name };
    let response = match handler.answer(&pod, all_nodes, &headers).await {
        Ok(response) => response,
        Err(refusal) => {
            tracing::debug!(%pod, status = %refusal.status, text = %refusal.text, "a question was refused");
            let mut response = problem(refusal.status, &refusal.text);
            if refusal.status == StatusCode::UNAUTHORIZED {
                let headers = response.headers_mut();
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
                // An unauthenticated client must not occupy a connection that a user could use.
                headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
            }
            response
        }
    };
    handler.metrics.answered(response.status());
    response
}

fn unchecked(error: divvy_kube::Error) -> AnswerRefusal {
    AnswerRefusal::unavailable(format!("the explainer cannot answer now: {error}"))
}

fn bearer(headers: &HeaderMap) -> Result<&str, AnswerRefusal> {
    let refused = |text: &str| AnswerRefusal::new(StatusCode::UNAUTHORIZED, text);
    let header = headers
        .get(header::AUTHORIZATION)
        .ok_or_else(|| refused("the request has no token of the user (Authorization: Bearer …)"))?;
    let text = header.to_str().unwrap_or_default();
    let token = text
        .get(..7)
        .filter(|scheme| scheme.eq_ignore_ascii_case("bearer "))
        .and_then(|_| text.get(7..));
    let token = token.unwrap_or_default().trim();
    if token.is_empty() || token.len() > LONGEST_TOKEN {
        return Err(refused(
            "the header Authorization does not contain a token of a Kubernetes user",
        ));
    }
    Ok(token)
}

/// Return the response, whose body is sent piece by piece. The question's turn ends when the last piece has been taken; this
/// limits the number of slow readers.
fn json(body: Vec<u8>, turn: OwnedSemaphorePermit) -> Response {
    let length = body.len();
    let pieces = futures::stream::unfold((Bytes::from(body), turn), |(mut rest, turn)| async move {
        let piece = rest.split_to(rest.len().min(CHUNK));
        (!piece.is_empty()).then(|| (Ok::<Bytes, std::convert::Infallible>(piece), (rest, turn)))
    });
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CONTENT_LENGTH, HeaderValue::from(length)),
    ];
    (headers, Body::from_stream(pieces)).into_response()
}
