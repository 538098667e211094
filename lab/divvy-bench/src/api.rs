//! An API server for one cluster that answers like a real API server with a watch cache. Each list is one complete response that
//! ignores `limit`, is not compressed, and has no Content-Length. Watches stay open and send bookmarks.
//!
//! A list always shows the cluster as of [`FIRST`]. Later writes are sent through the watch, which starts where the list ends.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::io::Write as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Query, State};
use axum::http::{Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use futures::{Stream, StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::cluster::{ClusterSize, NAMESPACE, with_kind};

/// The `resourceVersion` of the lists.
pub const FIRST: u64 = 1_000_000;
/// The time that a Binding takes.
const LATENCY: Duration = Duration::from_millis(2);
/// The interval between the bookmarks of a watch.
const BOOKMARK: Duration = Duration::from_secs(10);
/// The number of bytes of a list that are sent at a time. The ends of objects do not coincide with the ends of these pieces.
const PIECE: usize = 64 << 10;
/// The resources that have no objects, each with the kind of its objects.
const EMPTY: [(&str, &str); 13] = [
    ("configmaps", "ConfigMap"),
    ("daemonsets", "DaemonSet"),
    ("deployments", "Deployment"),
    ("events", "Event"),
    ("leases", "Lease"),
    ("namespaces", "Namespace"),
    ("persistentvolumeclaims", "PersistentVolumeClaim"),
    ("poddisruptionbudgets", "PodDisruptionBudget"),
    ("priorityclasses", "PriorityClass"),
    ("replicasets", "ReplicaSet"),
    ("runtimeclasses", "RuntimeClass"),
    ("secrets", "Secret"),
    ("services", "Service"),
];

/// A cluster whose lists have been rendered, so that it can be served.
#[derive(Debug)]
pub struct RenderedApi {
    cluster: ClusterSize,
    nodes: Bytes,
    pods: Bytes,
    written: Mutex<WrittenObjects>,
    /// Announces the number of changes to watches that wait for more changes.
    changes: watch::Sender<usize>,
    unknown: Mutex<BTreeSet<String>>,
    /// The ConfigMap that was written last.
    configmap: Mutex<Option<Value>>,
}

/// The objects that clients have written.
#[derive(Debug, Default)]
struct WrittenObjects {
    /// The written pods by position.
    pods: BTreeMap<usize, Value>,
    /// The lines of the watch of pods. The first line has the version that follows [`FIRST`].
    lines: Vec<Bytes>,
}

type Parameters = HashMap<String, String>;

impl RenderedApi {
    /// Render the lists of a cluster. For a large cluster, this takes some seconds.
    pub fn new(cluster: ClusterSize) -> RenderedApi {
        RenderedApi {
            nodes: list("Node", cluster.nodes, |i| cluster.node(i)),
            pods: list("Pod", cluster.pods + cluster.waiting, |i| cluster.pod(i)),
            cluster,
            written: Mutex::default(),
            changes: watch::Sender::new(0),
            unknown: Mutex::default(),
            configmap: Mutex::default(),
        }
    }

    /// Return the sizes in bytes of the list of nodes and of the list of pods.
    pub fn sizes(&self) -> (usize, usize) {
        (self.nodes.len(), self.pods.len())
    }

    /// Answer requests until the process ends.
    pub async fn serve(self, listener: TcpListener) -> std::io::Result<()> {
        axum::serve(listener, Router::new().fallback(answer).with_state(Arc::new(self))).await
    }

    fn written(&self) -> MutexGuard<'_, WrittenObjects> {
        self.written.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pod(&self, name: &str) -> Option<(usize, Value)> {
        let position = self.cluster.pod_position(name)?;
        let written = self.written().pods.get(&position).cloned();
        Some((
            position,
            written.unwrap_or_else(|| with_kind("Pod", self.cluster.pod(position))),
        ))
    }

    /// Store a pod and notify the watches.
    fn write(&self, position: usize, mut pod: Value) -> Value {
        let mut written = self.written();
        pod["metadata"]["resourceVersion"] = json!((FIRST + 1 + written.lines.len() as u64).to_string());
        written
            .lines
            .push(Bytes::from(format!("{}\n", json!({"type": "MODIFIED", "object": pod}))));
        written.pods.insert(position, pod.clone());
        self.changes.send_replace(written.lines.len());
        pod
    }

    /// Return the changes of pods after this version, with bookmarks in between.
    fn watch_pods(self: Arc<RenderedApi>, from: u64) -> impl Stream<Item = Bytes> {
        let told = usize::try_from(from.saturating_sub(FIRST)).unwrap_or(0);
        let changes = self.changes.subscribe();
        stream::unfold((self, changes, told), |(api, mut changes, told)| async move {
            loop {
                let next = api.written().lines.get(told).cloned();
                if let Some(line) = next {
                    return Some((line, (api, changes, told + 1)));
                }
                match tokio::time::timeout(BOOKMARK, changes.changed()).await {
                    Ok(Ok(())) => {}
                    Ok(Err(_)) => return None,
                    Err(_) => {
                        let line = bookmark("Pod", FIRST + told as u64);
                        return Some((line, (api, changes, told)));
                    }
                }
            }
        })
    }
}

fn list(kind: &str, count: usize, object: impl Fn(usize) -> Value) -> Bytes {
    let mut text = Vec::with_capacity(count * object(0).to_string().len() * 17 / 16 + 256);
    // Writing to memory does not fail.
    let _ = write!(
        text,
        r#"{{"kind":"{kind}List","apiVersion":"v1","metadata":{{"resourceVersion":"{FIRST}"}},"items":["#
    );
    for i in 0..count {
        if i > 0 {
            text.push(b',');
        }
        let _ = serde_json::to_writer(&mut text, &object(i));
    }
    text.extend_from_slice(b"]}\n");
    Bytes::from(text)
}

fn bookmark(kind: &str, version: u64) -> Bytes {
    let object = with_kind(
        kind,
        json!({"metadata": {"resourceVersion": version.to_string(), "creationTimestamp": null}}),
    );
    Bytes::from(format!("{}\n", json!({"type": "BOOKMARK", "object": object})))
}

/// Return a response without a Content-Length, so that it is sent in chunks.
fn streamed(pieces: impl Stream<Item = Bytes> + Send + 'static) -> Response {
    let body = Body::from_stream(pieces.map(Ok::<_, Infallible>));
    ([(header::CONTENT_TYPE, "application/json")], body).into_response()
}

fn whole(list: &Bytes) -> Response {
    let list = list.clone();
    streamed(stream::iter((0..list.len()).step_by(PIECE)).map(move |from| list.slice(from..list.len().min(from + PIECE))))
}

fn said(code: StatusCode, value: &Value) -> Response {
    (code, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

fn failed(code: StatusCode, reason: &str, message: &str) -> Response {
    said(
        code,
        &json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": message, "reason": reason, "code": code.as_u16()}),
    )
}

async fn answer(
    State(api): State<Arc<RenderedApi>>,
    method: Method,
    uri: Uri,
    Query(parameters): Query<Parameters>,
    body: Bytes,
) -> Response {
    let path: Vec<&str> = uri.path().split('/').filter(|part| !part.is_empty()).collect();
    let body: Value = serde_json::from_slice(&body).unwrap_or_default();
    match (method.as_str(), path.as_slice()) {
        ("GET", ["api", "v1", "nodes"]) => nodes(&api, &parameters),
        ("GET", ["api", "v1", "pods"] | ["api", "v1", "namespaces", NAMESPACE, "pods"]) => pods(api, &parameters),
        ("GET", ["api", "v1", "nodes", name]) => match api.cluster.node_position(name) {
            Some(i) => said(StatusCode::OK, &with_kind("Node", api.cluster.node(i))),
            None => not_found("nodes", name),
        },
        (method, ["api", "v1", "namespaces", NAMESPACE, "pods", name, rest @ ..]) => match api.pod(name) {
            Some((position, pod)) => of_pod(&api, method, rest, position, pod, body).await,
            None => not_found("pods", name),
        },
        ("GET", ["version"]) => said(
            StatusCode::OK,
            &json!({"major": "1", "minor": "33", "gitVersion": "v1.33.2", "platform": "linux/amd64"}),
        ),
        ("GET", ["api"]) => said(StatusCode::OK, &json!({"kind": "APIVersions", "versions": ["v1"]})),
        ("GET", ["apis"]) => said(
            StatusCode::OK,
            &json!({"kind": "APIGroupList", "apiVersion": "v1", "groups": []}),
        ),
        ("GET", ["healthz" | "livez" | "readyz"]) => "ok".into_response(),
        ("POST", ["apis", "authentication.k8s.io", version, "selfsubjectreviews"]) => said(
            StatusCode::CREATED,
            &json!({"kind": "SelfSubjectReview", "apiVersion": format!("authentication.k8s.io/{version}"),
                "status": {"userInfo": {"username": "bench", "groups": ["system:masters"]}}}),
        ),
        ("POST", ["apis", "authorization.k8s.io", version, "selfsubjectaccessreviews"]) => said(
            StatusCode::CREATED,
            &json!({"kind": "SelfSubjectAccessReview", "apiVersion": format!("authorization.k8s.io/{version}"), "spec": body["spec"],
                "status": {"allowed": true}}),
        ),
        // Every token is valid, and its user may do everything.
        ("POST", ["apis", "authentication.k8s.io", "v1", "tokenreviews"]) => {
            let status = json!({"authenticated": true, "user": {"username": "ann"}});
            said(
                StatusCode::CREATED,
                &json!({"kind": "TokenReview", "apiVersion": "authentication.k8s.io/v1", "spec": body["spec"], "status": status}),
            )
        }
        ("POST", ["apis", "authorization.k8s.io", "v1", "subjectaccessreviews"]) => {
            let status = json!({"allowed": true});
            said(
                StatusCode::CREATED,
                &json!({"kind": "SubjectAccessReview", "apiVersion": "authorization.k8s.io/v1", "spec": body["spec"], "status": status}),
            )
        }
        ("PATCH", [.., "configmaps", name]) => {
            let map = with_kind("ConfigMap", json!({"metadata": {"name": name}, "data": body["data"]}));
            *api.configmap.lock().unwrap_or_else(PoisonError::into_inner) = Some(map.clone());
            said(StatusCode::OK, &map)
        }
        ("GET", [.., "configmaps", name]) => {
            let map = api.configmap.lock().unwrap_or_else(PoisonError::into_inner).clone();
            map.map_or_else(|| not_found("configmaps", name), |map| said(StatusCode::OK, &map))
        }
        // An event is accepted and discarded.
        ("POST", [.., "events"]) => said(StatusCode::CREATED, &body),
        ("PATCH" | "PUT", [.., "events", _]) => said(StatusCode::OK, &body),
        ("GET", [group @ .., resource]) if let Some((_, kind)) = EMPTY.iter().find(|(plural, _)| plural == resource) => {
            if parameters.contains_key("watch") {
                streamed(only_bookmarks(kind))
            } else {
                let version = match group {
                    ["apis", name, version, ..] => format!("{name}/{version}"),
                    _ => "v1".to_owned(),
                };
                let list = json!({"kind": format!("{kind}List"), "apiVersion": version, "metadata": {"resourceVersion": FIRST.to_string()}, "items": []});
                said(StatusCode::OK, &list)
            }
        }
        _ => {
            let what = format!("{method} {}", uri.path());
            let mut unknown = api.unknown.lock().unwrap_or_else(PoisonError::into_inner);
            if unknown.len() < 100 && unknown.insert(what.clone()) {
                #[expect(clippy::print_stderr, reason = "the only hint for a tool that this server does not support")]
                {
                    eprintln!("this server does not support the request {what}");
                }
            }
            failed(
                StatusCode::NOT_FOUND,
                "NotFound",
                "the server could not find the requested resource",
            )
        }
    }
}

fn not_found(plural: &str, name: &str) -> Response {
    let mut status =
        json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "NotFound", "code": 404});
    status["message"] = json!(format!("{plural} \"{name}\" not found"));
    status["details"] = json!({"name": name, "kind": plural});
    said(StatusCode::NOT_FOUND, &status)
}

/// Return a refusal if the client's list parameters are not supported, else `None`.
fn refused(parameters: &Parameters) -> Option<Response> {
    // An API server without WatchList answers like this; clients then list.
    if parameters.contains_key("sendInitialEvents") {
        let words =
            "sendInitialEvents: Forbidden: sendInitialEvents is forbidden for watch unless the WatchList feature gate is enabled";
        return Some(failed(StatusCode::UNPROCESSABLE_ENTITY, "Invalid", words));
    }
    let selects = parameters.get("labelSelector").is_some_and(|labels| !labels.is_empty());
    selects.then(|| {
        failed(
            StatusCode::BAD_REQUEST,
            "BadRequest",
            "this server does not know label selectors",
        )
    })
}

/// Return `name` from a term `field=name` of the field selector.
fn selected<'a>(parameters: &'a Parameters, field: &str) -> Option<&'a str> {
    let terms = parameters.get("fieldSelector")?.split(',');
    terms
        .filter_map(|term| term.split_once('='))
        .find(|(name, _)| *name == field)
        .map(|(_, value)| value.trim_start_matches('='))
}

fn only_bookmarks(kind: &'static str) -> impl Stream<Item = Bytes> + Send + 'static {
    stream::unfold((), move |()| async move {
        tokio::time::sleep(BOOKMARK).await;
        Some((bookmark(kind, FIRST), ()))
    })
}

fn nodes(api: &RenderedApi, parameters: &Parameters) -> Response {
    if let Some(refusal) = refused(parameters) {
        return refusal;
    }
    if parameters.contains_key("watch") {
        return limited(only_bookmarks("Node"), parameters);
    }
    match selected(parameters, "metadata.name") {
        Some(name) => {
            let found: Vec<usize> = api.cluster.node_position(name).into_iter().collect();
            whole(&list("Node", found.len(), |at| {
                found.get(at).map_or(Value::Null, |i| api.cluster.node(*i))
            }))
        }
        None => whole(&api.nodes),
    }
}

fn pods(api: Arc<RenderedApi>, parameters: &Parameters) -> Response {
    if let Some(refusal) = refused(parameters) {
        return refusal;
    }
    if parameters.contains_key("watch") {
        let from = parameters.get("resourceVersion").and_then(|version| version.parse().ok());
        return limited(api.watch_pods(from.unwrap_or(FIRST)), parameters);
    }
    let found: Vec<usize> = match (selected(parameters, "metadata.name"), selected(parameters, "spec.nodeName")) {
        (None, None) => return whole(&api.pods),
        (Some(name), _) => api.cluster.pod_position(name).into_iter().collect(),
        (None, Some(node)) => {
            let node = api.cluster.node_position(node);
            node.map(|node| api.cluster.pods_of(node).collect()).unwrap_or_default()
        }
    };
    whole(&list("Pod", found.len(), |at| {
        found.get(at).map_or(Value::Null, |i| api.cluster.pod(*i))
    }))
}

/// Return a watch that ends after the timeout that the client requested.
fn limited(lines: impl Stream<Item = Bytes> + Send + 'static, parameters: &Parameters) -> Response {
    match parameters.get("timeoutSeconds").and_then(|seconds| seconds.parse().ok()) {
        None => streamed(lines),
        Some(seconds) => streamed(lines.take_until(tokio::time::sleep(Duration::from_secs(seconds)))),
    }
}

async fn of_pod(api: &RenderedApi, method: &str, rest: &[&str], position: usize, mut pod: Value, body: Value) -> Response {
    match (method, rest) {
        ("GET", []) => said(StatusCode::OK, &pod),
        // gpushare's extender writes its annotations in this way.
        ("PUT", []) => said(StatusCode::OK, &api.write(position, body)),
        ("PATCH", []) => {
            merge(&mut pod["metadata"]["annotations"], &body["metadata"]["annotations"]);
            merge(&mut pod["metadata"]["labels"], &body["metadata"]["labels"]);
            said(StatusCode::OK, &api.write(position, pod))
        }
        ("POST", ["binding"]) => {
            tokio::time::sleep(LATENCY).await;
            if pod["spec"]["nodeName"].is_string() {
                return failed(StatusCode::CONFLICT, "Conflict", "the pod is already bound");
            }
            pod["spec"]["nodeName"] = body["target"]["name"].clone();
            merge(&mut pod["metadata"]["annotations"], &body["metadata"]["annotations"]);
            api.write(position, pod);
            let created = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201});
            said(StatusCode::CREATED, &created)
        }
        _ => failed(
            StatusCode::METHOD_NOT_ALLOWED,
            "MethodNotAllowed",
            "this server does not support this request on pods",
        ),
    }
}

/// Add the entries of one map to another.
fn merge(into: &mut Value, from: &Value) {
    for (key, value) in from.as_object().into_iter().flatten() {
        into[key] = value.clone();
    }
}
