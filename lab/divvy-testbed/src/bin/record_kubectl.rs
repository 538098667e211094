//! Record the requests that a real kubectl sends to the embedded API server, and kubectl's output. `tests/it/api/kubectl.rs` replays the
//! requests without kubectl. Run this by hand when the set of commands changes:
//!
//! ```sh
//! cargo run -p divvy-testbed --bin record_kubectl -- kubectl lab/divvy-testbed/tests/data/kubectl
//! ```

use std::io::{self, Write};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::middleware::Next;
use axum::response::Response;
use divvy_testbed::api::{ApiServer, Clock, Options, PatchKind};
use serde_json::{Value, json};

type Log = Arc<Mutex<Vec<Value>>>;

/// Answer as the server does, and record the request and the response's code.
async fn record(log: Log, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let bytes = axum::body::to_bytes(body, usize::MAX).await.unwrap_or_default();
    let header = |name: &str| parts.headers.get(name).and_then(|v| v.to_str().ok()).map(str::to_owned);
    let mut entry = json!({
        "method": parts.method.as_str(),
        "path": parts.uri.path_and_query().map_or("", |p| p.as_str()),
        "accept": header("accept"),
    });
    if !bytes.is_empty() {
        entry["contentType"] = header("content-type").into();
        entry["body"] = serde_json::from_slice(&bytes).unwrap_or_else(|_| String::from_utf8_lossy(&bytes).into());
    }
    let response = next.run(Request::from_parts(parts, Body::from(bytes))).await;
    entry["code"] = response.status().as_u16().into();
    if let Ok(mut log) = log.lock() {
        log.push(entry);
    }
    response
}

const POD: &str = "apiVersion: v1\nkind: Pod\nmetadata:\n  name: first\nspec:\n  containers:\n  - name: main\n    image: tutorial:1\n    \
                   resources:\n      limits:\n        aliyun.com/gpu-mem: 3\n";

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [kubectl, out] = arguments.as_slice() else {
        return Err("usage: record_kubectl KUBECTL DIRECTORY".into());
    };
    let start = "2026-11-01T10:00:00Z".parse()?;
    let api = ApiServer::new(Options {
        clock: Clock::of_tokio(start),
        seed: Some(1),
        ..Options::default()
    });
    api.create(
        "nodes",
        json!({"metadata": {"name": "n1"}, "status": {
            "capacity": {"aliyun.com/gpu-mem": 16}, "allocatable": {"aliyun.com/gpu-mem": 16},
            "conditions": [{"type": "Ready", "status": "True"}],
            "addresses": [{"type": "InternalIP", "address": "192.168.8.100"}],
            "nodeInfo": {"kubeletVersion": "v1.36.3", "osImage": "testbed", "kernelVersion": "6.1", "containerRuntimeVersion": "none://1",
                         "machineID": "", "systemUUID": "", "bootID": "", "operatingSystem": "linux", "architecture": "amd64", "kubeProxyVersion": ""}}}),
    )?;
    let log = Log::default();
    let router = api.router().layer(axum::middleware::from_fn({
        let log = log.clone();
        move |request, next| record(log.clone(), request, next)
    }));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let addr = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, router).await });

    let home = tempfile::tempdir()?;
    std::fs::write(home.path().join("config"), api.kubeconfig(addr))?;
    std::fs::write(home.path().join("pod.yaml"), POD)?;
    std::fs::write(
        home.path().join("changed.yaml"),
        POD.replace("metadata:\n", "metadata:\n  labels: {tier: front}\n"),
    )?;
    std::fs::create_dir_all(out)?;

    let steps: &[(&str, &str)] = &[
        ("apply-create", "apply -f pod.yaml"),
        ("apply-change", "apply --validate=false -f changed.yaml"),
        ("apply-server-side", "apply --server-side --validate=false -f changed.yaml"),
        ("get-pods", "get pods"),
        ("get-pods-wide", "get pods -o wide"),
        ("get-pods-all-json", "get pods -A -o json"),
        ("get-pod-yaml", "get pod first -o yaml"),
        ("get-nodes", "get nodes"),
        ("get-events", "get events"),
        ("describe-pod", "describe pod first"),
        ("describe-node", "describe node n1"),
        ("get-pods-watch", "get pods -w --request-timeout=2s"),
        ("label", "label pod first color=blue"),
        ("annotate", "annotate pod first note=yes"),
        (
            "wait",
            "wait pod/first --for=jsonpath={.metadata.labels.color}=blue --timeout=5s",
        ),
        ("version", "version"),
        ("api-resources", "api-resources"),
        ("create-configmap", "create configmap c --from-literal=a=b"),
        ("cordon", "cordon n1"),
        ("get-selector", "get pods -l color=blue --field-selector spec.nodeName=n1"),
        ("delete-pod", "delete pod first"),
        ("delete-force", "delete pod second --force"),
        ("run-get-missing", "get pod absent"),
    ];
    let mut stdout = io::stdout();
    for (name, command) in steps {
        prepare(&api, name)?;
        if let Ok(mut log) = log.lock() {
            log.clear();
        }
        // Do as a kubelet would: remove the pod a moment after its deletion was requested.
        let kubelet = (*name == "delete-pod").then(|| tokio::spawn(end_pod(api.clone())));
        let output = run(kubectl, home.path(), command).await?;
        if let Some(kubelet) = kubelet {
            kubelet.await?;
        }
        let requests = log.lock().map(|log| log.clone()).unwrap_or_default();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        writeln!(stdout, "$ kubectl {command}\n{text}{errors}({} requests)\n", requests.len())?;
        let recording =
            json!({"command": command, "exit": output.status.code(), "stdout": text, "stderr": errors, "requests": requests});
        let mut file = serde_json::to_string_pretty(&recording)?;
        file.push('\n');
        std::fs::write(Path::new(out).join(format!("{name}.json")), file)?;
    }
    Ok(())
}

/// Change the cluster's state before a step.
fn prepare(api: &ApiServer, step: &str) -> Result<(), Box<dyn std::error::Error>> {
    match step {
        "get-pods-wide" => {
            api.create(
                "pods/binding",
                json!({"metadata": {"name": "first", "annotations": {"divvy.dev/allocation": "{}"}}, "target": {"kind": "Node", "name": "n1"}}),
            )?;
            let status = json!({"status": {"phase": "Running", "podIP": "10.0.0.1", "podIPs": [{"ip": "10.0.0.1"}],
                "conditions": [{"type": "Ready", "status": "True"}],
                "containerStatuses": [{"name": "main", "image": "tutorial:1", "imageID": "", "restartCount": 0, "ready": true,
                    "state": {"running": {"startedAt": "2026-11-01T10:00:01Z"}}, "lastState": {}}]}});
            api.patch("pods/status", "default", "first", PatchKind::Strategic, &status)?;
        }
        "get-events" => {
            api.create(
                "events.events.k8s.io",
                json!({"metadata": {"name": "first.1"}, "regarding": {"kind": "Pod", "namespace": "default", "name": "first",
                           "uid": api.get("pods", "default", "first")?["metadata"]["uid"]},
                       "reason": "Placed", "note": "on GPU 0", "type": "Normal", "action": "Bind", "reportingController": "divvy",
                       "reportingInstance": "x", "eventTime": "2026-11-01T10:00:00.000000Z"}),
            )?;
        }
        "delete-force" => {
            api.create(
                "pods",
                json!({"metadata": {"name": "second"}, "spec": {"nodeName": "n1", "containers": [{"name": "c", "image": "i"}]}}),
            )?;
        }
        _ => {}
    }
    Ok(())
}

async fn end_pod(api: ApiServer) {
    let deleting = |api: &ApiServer| {
        let pod = api.get("pods", "default", "first").ok()?;
        (!pod["metadata"]["deletionTimestamp"].is_null()).then_some(())
    };
    api.until(Duration::from_secs(10), deleting).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    let now = divvy_testbed::api::DeleteOptions {
        grace_period_s: Some(0),
        ..Default::default()
    };
    // It does not matter if the pod is already gone.
    drop(api.delete("pods", "default", "first", &now));
}

async fn run(kubectl: &str, home: &Path, command: &str) -> io::Result<std::process::Output> {
    let mut process = Command::new(kubectl);
    process
        .args(["--kubeconfig", "config"])
        .args(command.split(' '))
        .current_dir(home)
        .env("HOME", home);
    tokio::task::spawn_blocking(move || process.output())
        .await
        .map_err(io::Error::other)?
}
