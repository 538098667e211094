//! The embedded API server, tested through kube-rs and through recorded requests of a real kubectl.

mod apply;
mod events;
mod faults;
mod kubectl;
mod objects;
mod pods;
mod port;
mod scheduling;
mod users;
mod watches;

use axum::body::Body;
use divvy_testbed::api::{ApiServer, ApiServerOptions, Clock};
use http::Request;
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use serde_json::{Value, json};
use tower::ServiceExt;

/// Return a server with a seed and with a clock that follows tokio's.
fn server() -> ApiServer {
    server_with(ApiServerOptions::default())
}

fn server_with(options: ApiServerOptions) -> ApiServer {
    ApiServer::new(ApiServerOptions {
        clock: Clock::of_tokio("2026-11-21T10:00:00Z".parse().unwrap()),
        seed: Some(1),
        ..options
    })
}

fn pods(api: &ApiServer) -> Api<Pod> {
    Api::namespaced(api.client(), "default")
}

fn pod(name: &str) -> Value {
    json!({"metadata": {"name": name}, "spec": {"containers": [
        {"name": "main", "image": "tutorial:1", "resources": {"limits": {"aliyun.com/gpu-mem": 3}}}]}})
}

fn typed(value: Value) -> Pod {
    serde_json::from_value(value).unwrap()
}

/// Return the code, reason, and message with which the API server refused.
fn refusal<T: std::fmt::Debug>(result: kube::Result<T>) -> (u16, String, String) {
    match result {
        Err(kube::Error::Api(status)) => (status.code, status.reason.clone(), status.message.clone()),
        other => panic!("expected a Status, got {other:?}"),
    }
}

/// Send one plain HTTP request. Return the response's code and body.
async fn request(api: &ApiServer, method: &str, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, Value) {
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let body = if body.is_null() {
        Body::empty()
    } else {
        Body::from(body.to_string())
    };
    let response = api.router().oneshot(request.body(body).unwrap()).await.unwrap();
    let code = response.status().as_u16();
    let bytes = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (
        code,
        serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into()),
    )
}
