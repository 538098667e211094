use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, Query, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures::StreamExt;
use serde_json::{Value, json};
use tokio::sync::mpsc;

use crate::Outcome;
use crate::cluster::Cluster;

const PAGE: usize = 500;
/// How long a Binding takes.
const LATENCY: Duration = Duration::from_millis(2);

struct Api {
    cluster: Cluster,
    /// Lists, rendered once.
    nodes: Vec<Bytes>,
    pods: Vec<Bytes>,
    /// The watch of pods.
    watch: Mutex<Option<mpsc::UnboundedSender<Bytes>>>,
}

/// The few paths that the extender uses.
pub(crate) async fn serve(cluster: &Cluster) -> Outcome<()> {
    let api = Arc::new(Api {
        cluster: *cluster,
        nodes: pages("NodeList", cluster.nodes, |i| cluster.node(i)),
        pods: pages("PodList", cluster.pods + cluster.waiting, |i| cluster.pod(i)),
        watch: Mutex::new(None),
    });
    let router = Router::new()
        .route("/api/v1/nodes", get(nodes))
        .route("/api/v1/pods", get(pods))
        .route("/api/v1/namespaces/{namespace}/pods/{name}", get(pod))
        .route("/api/v1/namespaces/{namespace}/pods/{name}/binding", post(bind))
        .with_state(api);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, router).await?)
}

fn pages(kind: &str, count: usize, object: impl Fn(usize) -> String) -> Vec<Bytes> {
    let starts = (0..count.max(1)).step_by(PAGE);
    let page = |from: usize| {
        let until = count.min(from + PAGE);
        let more = if until < count { until.to_string() } else { String::new() };
        let items: Vec<String> = (from..until).map(&object).collect();
        let metadata = json!({"resourceVersion": "1", "continue": more});
        Bytes::from(format!(
            r#"{{"kind":"{kind}","apiVersion":"v1","metadata":{metadata},"items":[{}]}}"#,
            items.join(",")
        ))
    };
    starts.map(page).collect()
}

fn json_bytes(bytes: Bytes) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], bytes).into_response()
}

fn page_of(pages: &[Bytes], query: &HashMap<String, String>) -> Response {
    let from: usize = query.get("continue").and_then(|token| token.parse().ok()).unwrap_or(0);
    match pages.get(from / PAGE) {
        Some(page) => json_bytes(page.clone()),
        None => StatusCode::GONE.into_response(),
    }
}

async fn nodes(State(api): State<Arc<Api>>, Query(query): Query<HashMap<String, String>>) -> Response {
    if query.contains_key("watch") {
        return Body::from_stream(futures::stream::pending::<Result<Bytes, Infallible>>()).into_response();
    }
    page_of(&api.nodes, &query)
}

async fn pods(State(api): State<Arc<Api>>, Query(query): Query<HashMap<String, String>>) -> Response {
    if query.contains_key("watch") {
        let (sender, receiver) = mpsc::unbounded_channel();
        *api.watch.lock().unwrap() = Some(sender);
        let lines = futures::stream::unfold(receiver, |mut receiver| async { Some((receiver.recv().await?, receiver)) });
        return Body::from_stream(lines.map(Ok::<_, Infallible>)).into_response();
    }
    page_of(&api.pods, &query)
}

fn object(api: &Api, name: &str) -> Option<Value> {
    serde_json::from_str(&api.cluster.pod(Cluster::position(name)?)).ok()
}

async fn pod(State(api): State<Arc<Api>>, Path((_, name)): Path<(String, String)>) -> Response {
    object(&api, &name).map_or_else(|| StatusCode::NOT_FOUND.into_response(), |pod| Json(pod).into_response())
}

async fn bind(State(api): State<Arc<Api>>, Path((_, name)): Path<(String, String)>, Json(binding): Json<Value>) -> Response {
    tokio::time::sleep(LATENCY).await;
    let Some(mut pod) = object(&api, &name) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    pod["spec"]["nodeName"] = binding["target"]["name"].clone();
    pod["metadata"]["annotations"] = binding["metadata"]["annotations"].clone();
    pod["metadata"]["resourceVersion"] = json!("2");
    if let Some(watch) = &*api.watch.lock().unwrap() {
        let line = format!("{}\n", json!({"type": "MODIFIED", "object": pod}));
        // A watch that ended is taken up again by itself.
        let _ = watch.send(Bytes::from(line));
    }
    let created = json!({"kind": "Status", "apiVersion": "v1", "status": "Success", "code": 201});
    (StatusCode::CREATED, Json(created)).into_response()
}
