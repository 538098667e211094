//! Replay the recorded requests of a real kubectl, and compare the answers with the recorded ones.

use std::path::{Path, PathBuf};
use std::time::Duration;

use divvy_testbed::api::{DeleteOptions, PatchKind};

use super::*;

fn recordings() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/kubectl")
}

fn recording(name: &str) -> Value {
    let path = recordings().join(format!("{name}.json"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

/// Return a cluster in the state that it had before the commands were recorded.
fn cluster() -> ApiServer {
    let api = server();
    api.create(
        "nodes",
        json!({"metadata": {"name": "n1"}, "status": {"capacity": {"aliyun.com/gpu-mem": 16}, "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "192.168.8.100"}], "nodeInfo": {"kubeletVersion": "v1.36.3", "osImage": "testbed",
                "architecture": "", "bootID": "", "containerRuntimeVersion": "none://1", "kernelVersion": "6.1", "kubeProxyVersion": "",
                "machineID": "", "operatingSystem": "linux", "systemUUID": ""}}}),
    )
    .unwrap();
    api
}

/// Replay the requests of one command. Return the last response that was not discovery.
async fn replay(api: &ApiServer, name: &str) -> Value {
    let recording = recording(name);
    assert_eq!(
        recording["exit"],
        if name == "run-get-missing" || name == "create-configmap" {
            1
        } else {
            0
        },
        "{name}"
    );
    let mut last = Value::Null;
    let requests = recording["requests"].as_array().unwrap();
    assert!(!requests.is_empty(), "{name}");
    for recorded in requests {
        let text = |field: &str| recorded[field].as_str().unwrap_or("");
        let mut path = text("path").to_owned();
        if path.contains("watch=true") {
            // The revision belongs to another run, and the response does not end on its own.
            let (head, tail) = path.split_once("resourceVersion=").unwrap();
            let tail = tail.trim_start_matches(|c: char| c.is_ascii_digit());
            path = format!("{head}resourceVersion={}{tail}&timeoutSeconds=1", api.revision())
                .replace("timeoutSeconds=5", "ignored=5");
        }
        let headers = [("accept", text("accept")), ("content-type", text("contentType"))];
        let (code, answer) = request(api, text("method"), &path, &headers, &recorded["body"]).await;
        assert_eq!(code, recorded["code"], "{name}: {} {path}: {answer}", text("method"));
        if text("path").starts_with("/api/v1/") {
            last = answer;
        }
    }
    last
}

/// Return the cells of the columns that are printed without `-o wide`, or with it.
fn printed(table: &Value, wide: bool) -> Vec<Vec<String>> {
    assert_eq!(table["kind"], "Table");
    let columns = table["columnDefinitions"].as_array().unwrap();
    let shown = |row: &Value| -> Vec<String> {
        columns
            .iter()
            .zip(row["cells"].as_array().unwrap())
            .filter(|(column, _)| wide || column["priority"] == 0)
            .map(|(_, cell)| cell.as_str().map_or_else(|| cell.to_string(), str::to_owned))
            .collect()
    };
    table["rows"].as_array().unwrap().iter().map(shown).collect()
}

#[tokio::test(start_paused = true)]
async fn applying_the_tutorial_pod_creates_then_changes_it() {
    let api = cluster();
    let created = replay(&api, "apply-create").await;
    assert_eq!(
        created["spec"]["containers"][0]["resources"]["requests"]["aliyun.com/gpu-mem"],
        "3"
    );
    let changed = replay(&api, "apply-change").await;
    assert_eq!(changed["metadata"]["labels"]["tier"], "front");
    assert_eq!(changed["metadata"]["uid"], created["metadata"]["uid"]);
    replay(&api, "apply-server-side").await;
    let labelled = replay(&api, "label").await;
    assert_eq!(labelled["metadata"]["labels"], json!({"tier": "front", "color": "blue"}));
    assert_eq!(replay(&api, "annotate").await["metadata"]["annotations"]["note"], "yes");
    replay(&api, "wait").await;
}

#[tokio::test(start_paused = true)]
async fn get_prints_pods_nodes_and_events() {
    let api = cluster();
    replay(&api, "apply-create").await;
    assert_eq!(
        printed(&replay(&api, "get-pods").await, false),
        [["first", "0/1", "Pending", "0", "0s"]]
    );
    api.create(
        "pods/binding",
        json!({"metadata": {"name": "first"}, "target": {"name": "n1"}}),
    )
    .unwrap();
    let status = json!({"status": {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [
        {"name": "main", "restartCount": 0, "ready": true, "state": {"running": {}}, "image": "", "imageID": ""}]}});
    api.patch("pods/status", "default", "first", PatchKind::Strategic, &status)
        .unwrap();
    tokio::time::advance(Duration::from_secs(200)).await;
    assert_eq!(
        printed(&replay(&api, "get-pods-wide").await, true),
        [["first", "1/1", "Running", "0", "3m20s", "10.0.0.1", "n1", "<none>", "<none>"]]
    );
    assert_eq!(
        printed(&replay(&api, "get-nodes").await, false),
        [["n1", "Ready", "<none>", "3m20s", "v1.36.3"]]
    );
    replay(&api, "cordon").await;
    assert_eq!(
        printed(&replay(&api, "get-nodes").await, false)[0][1],
        "Ready,SchedulingDisabled"
    );
    api.create(
        "events.events.k8s.io",
        json!({"metadata": {"name": "e"}, "regarding": {"kind": "Pod", "namespace": "default", "name": "first"}, "reason": "Placed",
               "note": "on GPU 0", "type": "Normal", "eventTime": "2026-11-21T10:00:00.000000Z", "reportingController": "divvy"}),
    )
    .unwrap();
    assert_eq!(
        printed(&replay(&api, "get-events").await, false),
        [["3m20s", "Normal", "Placed", "pod/first", "on GPU 0"]]
    );
    let all = replay(&api, "get-pods-all-json").await;
    assert_eq!(all["kind"], "PodList");
    assert_eq!(replay(&api, "get-pod-yaml").await["kind"], "Pod");
    replay(&api, "get-pods-watch").await;
    api.patch(
        "pods",
        "default",
        "first",
        PatchKind::Merge,
        &json!({"metadata": {"labels": {"color": "blue"}}}),
    )
    .unwrap();
    assert_eq!(printed(&replay(&api, "get-selector").await, false).len(), 1);
    assert_eq!(replay(&api, "run-get-missing").await["reason"], "NotFound");
}

#[tokio::test(start_paused = true)]
async fn describe_finds_the_pod_and_its_events() {
    let api = cluster();
    replay(&api, "apply-create").await;
    api.create(
        "pods/binding",
        json!({"metadata": {"name": "first"}, "target": {"name": "n1"}}),
    )
    .unwrap();
    replay(&api, "describe-pod").await;
    replay(&api, "describe-node").await;
    for name in ["version", "api-resources", "create-configmap"] {
        replay(&api, name).await;
    }
}

/// `kubectl debug` panics on a 404 without details.
#[tokio::test(start_paused = true)]
async fn what_needs_a_real_container_is_refused_as_simulated() {
    let api = cluster();
    api.create("pods", pod("first")).unwrap();
    for (method, what, words) in [
        ("GET", "log?container=main", "it has no logs"),
        ("GET", "exec?command=ls", "no command runs in it"),
        ("POST", "exec?command=ls", "no command runs in it"),
        ("POST", "attach", "no command runs in it"),
        ("POST", "portforward", "nothing listens in it"),
        ("PATCH", "ephemeralcontainers", "none is added to it"),
    ] {
        let path = format!("/api/v1/namespaces/default/pods/first/{what}");
        let (code, status) = request(&api, method, &path, &[], &Value::Null).await;
        assert_eq!((code, &status["kind"]), (501, &json!("Status")), "{what}: {status}");
        let message = status["message"].as_str().unwrap();
        assert!(
            message.starts_with("this cluster is simulated") && message.contains(words),
            "{message}"
        );
        assert_eq!(status["details"]["name"], "first", "{status}");
        let missing = path.replace("first", "absent");
        let (code, status) = request(&api, method, &missing, &[], &Value::Null).await;
        assert_eq!((code, &status["reason"]), (404, &json!("NotFound")), "{what}: {status}");
    }
    // `kubectl logs -f` repeats its request after each refusal.
    let log = "/api/v1/namespaces/default/pods/first/log?follow=true";
    let (code, text) = request(&api, "GET", log, &[], &Value::Null).await;
    assert_eq!(code, 200);
    assert!(text.as_str().unwrap().contains("it has no logs"), "{text}");
    let (code, _) = request(&api, "GET", "/api/v1/namespaces/default/pods/first/scale", &[], &Value::Null).await;
    assert_eq!(code, 404);
}

#[tokio::test(start_paused = true)]
async fn deleting_is_graceful_unless_forced() {
    let api = cluster();
    replay(&api, "apply-create").await;
    api.create(
        "pods/binding",
        json!({"metadata": {"name": "first"}, "target": {"name": "n1"}}),
    )
    .unwrap();
    replay(&api, "delete-pod").await;
    assert!(!api.get("pods", "default", "first").unwrap()["metadata"]["deletionTimestamp"].is_null());
    let now = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    api.delete("pods", "default", "first", &now).unwrap();
    let mut second = pod("second");
    second["spec"]["nodeName"] = json!("n1");
    api.create("pods", second).unwrap();
    replay(&api, "delete-force").await;
    assert!(api.get("pods", "default", "second").is_err());
}

#[tokio::test(start_paused = true)]
async fn every_recording_is_replayed_by_some_test() {
    let source = include_str!("kubectl.rs");
    let mut count = 0;
    for entry in std::fs::read_dir(recordings()).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let name = name.trim_end_matches(".json");
        assert!(source.contains(&format!("\"{name}\"")), "{name} is not replayed");
        count += 1;
    }
    assert!(count >= 20, "{count}");
}
