//! Objects that no current API server stores, but that an old API server, an aggregated one, or a proxy may send. They must not stop the extender.

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use divvy_extender::serve;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::server::{Cluster, send, settings};

fn node(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let amounts = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8", "memory": "64Gi", "pods": "110"});
    let mut node = json!({"metadata": {"name": name, "uid": format!("u-{name}"), "resourceVersion": "3"}, "spec": {},
        "status": {"capacity": amounts, "allocatable": amounts}});
    change(&mut node);
    node
}

fn pod(name: &str, change: impl FnOnce(&mut Value)) -> Value {
    let mut pod = json!({
        "metadata": {"name": name, "namespace": "ns", "uid": format!("u-{name}"), "resourceVersion": "3", "annotations":
            {"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "10", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"}},
        "spec": {"nodeName": "good", "containers": [{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": "10"}}}]},
        "status": {"phase": "Running"}});
    change(&mut pod);
    pod
}

/// An API server that lists these objects and then sends nothing more.
async fn answer(request: Request, nodes: Vec<Value>, pods: Vec<Value>) -> Response {
    if request.uri().query().is_some_and(|query| query.contains("watch=true")) {
        return Response::new(Body::from_stream(
            futures::stream::pending::<Result<Vec<u8>, std::io::Error>>(),
        ));
    }
    let items = match request.uri().path() {
        "/api/v1/nodes" => nodes,
        "/api/v1/pods" => pods,
        _ => Vec::new(),
    };
    Response::new(Body::from(
        json!({"metadata": {"resourceVersion": "9"}, "items": items}).to_string(),
    ))
}

#[tokio::test]
async fn an_unreadable_object_does_not_prevent_readiness() {
    type Change = fn(&mut Value);
    let cases: [(&str, Change); 6] = [
        ("no spec", |object| {
            drop(object.as_object_mut().and_then(|object| object.remove("spec")))
        }),
        ("no object", |object| *object = json!(7)),
        ("no metadata", |object| {
            drop(object.as_object_mut().and_then(|object| object.remove("metadata")))
        }),
        ("a name that is none", |object| object["metadata"]["name"] = json!([1])),
        ("a status of another shape", |object| object["status"] = json!("fine")),
        ("a quantity that is none", |object| {
            object["status"]["capacity"] = json!({"aliyun.com/gpu-mem": true});
            object["spec"]["containers"] = json!([{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": true}}}]);
        }),
    ];
    for (name, change) in cases {
        let nodes = vec![node("bad", change), node("good", |_| ())];
        let pods = vec![pod("bad", change), pod("a", |_| ())];
        let router = Router::new().fallback(move |request| answer(request, nodes.clone(), pods.clone()));
        let stop = CancellationToken::new();
        let served = serve(kube::Client::new(router, "default"), settings(), stop.clone());
        let _stop = stop.drop_guard();
        Cluster::becomes_ready(&served).await;
        let asks = |units: u64| {
            json!({"Pod": pod("new", |pod| {
            pod["metadata"]["annotations"] = json!({});
            pod["spec"] = json!({"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": units}}}]});
        }), "NodeNames": ["good", "bad"]})
        };
        for (units, expected) in [(6, json!(["good"])), (7, json!([]))] {
            let (status, text) = send(&served.router, "POST", "/gpushare-scheduler/filter", asks(units).to_string()).await;
            assert_eq!(status, StatusCode::OK, "{name}: {text}");
            let answer: Value = serde_json::from_str(&text).expect("JSON");
            assert_eq!(answer["NodeNames"], expected, "{name}: {text}");
        }
    }
}
