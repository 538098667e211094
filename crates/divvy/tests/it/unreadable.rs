//! Objects that cannot be read, for every command that lists the objects of a cluster.

use serde_json::{Value, json};

use crate::cli::{self, beside, stderr, stdout};

/// Serve an API that returns each list as a whole and ignores `limit`. Return the path of a kubeconfig for it.
async fn serve(directory: &std::path::Path, nodes: Vec<Value>, pods: Vec<Value>) -> String {
    let answer = move |path: &str| {
        let items = match path {
            "/api/v1/nodes" => &nodes[..],
            "/api/v1/pods" => &pods[..],
            _ => &[],
        };
        ("200 OK", json!({"items": items, "metadata": {"resourceVersion": "9"}}))
    };
    cli::serve(directory, answer).await
}

/// Every command that lists a cluster reads the rest.
#[tokio::test]
async fn every_command_names_what_it_cannot_read() {
    let meta = |name: &str| json!({"name": name, "uid": format!("u-{name}"), "resourceVersion": "3"});
    let amounts = json!({"aliyun.com/gpu-mem": "16", "aliyun.com/gpu-count": "1", "cpu": "8", "memory": "64Gi", "pods": "110"});
    let nodes = vec![
        json!({"metadata": meta("no-spec"), "status": {"capacity": amounts, "allocatable": amounts}}),
        json!({"metadata": meta("good"), "spec": {}, "status": {"capacity": amounts, "allocatable": amounts}}),
        json!({"metadata": meta("no-quantity"), "spec": {}, "status": {"capacity": {"aliyun.com/gpu-mem": "16 GiB"}}}),
        json!({"metadata": meta("no-map"), "spec": {}, "status": {"capacity": 7}}),
    ];
    let pod = |name: &str, spec: Value| {
        let mut pod = json!({"metadata": meta(name), "spec": spec, "status": {"phase": "Running"}});
        pod["metadata"]["namespace"] = json!("ns");
        pod["metadata"]["annotations"] =
            json!({"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "10", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
        pod
    };
    let containers = |amount: Value| json!([{"name": "main", "resources": {"limits": {"aliyun.com/gpu-mem": amount}}}]);
    let pods = vec![
        pod("null-spec", json!(null)),
        pod("good", json!({"nodeName": "good", "containers": containers(json!("10"))})),
        pod(
            "no-quantity",
            json!({"nodeName": "good", "containers": containers(json!("10 GiB"))}),
        ),
        pod("no-list", json!({"nodeName": "good", "containers": 7})),
    ];
    let directory = tempfile::tempdir().expect("a directory");
    let kubeconfig = serve(directory.path(), nodes, pods).await;
    // `divvy doctor` reads other fields: a spec may be missing, and it parses quantities itself.
    let all = [
        "no-spec",
        "no-quantity",
        "no-map",
        "ns/null-spec",
        "ns/no-quantity",
        "ns/no-list",
    ];
    let shapes = ["no-map", "ns/null-spec", "ns/no-list"];
    let cases: [(&[&str], &[&str], &str); 5] = [
        (&["inspect", "gpushare"], &all, "10/16"),
        (&["why", "-A"], &all, "No pod waits for GPU memory in any namespace."),
        (&["audit"], &all, "1 GPU"),
        (&["simulate", "--cluster"], &all, "10.0 of 16.0 GiB"),
        (&["doctor", "--cluster", "--only", "K16"], &shapes, "2 pods checked"),
    ];
    for (command, bad, good) in cases {
        let output = beside(&[command, &["--kubeconfig", &kubeconfig]].concat(), &[]).await;
        let (out, log) = (stdout(&output), stderr(&output));
        assert!(out.contains(good), "{command:?}: no {good:?} in\n{out}\n{log}");
        for name in bad {
            let of_it = |line: &&str| line.contains(&format!(" {name} ")) && line.contains("left out: ");
            let lines: Vec<&str> = log.lines().filter(of_it).collect();
            assert_eq!(lines.len(), 1, "{command:?}: {name} in\n{log}");
        }
    }
}
