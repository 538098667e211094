//! The verb preempt.

use axum::http::StatusCode;
use serde_json::{Value, json};

use crate::server::*;

const PREEMPT: &str = "/gpushare-scheduler/preempt";

/// Return a pod of priority 1000. The tests use it with gpushare's fixture: n1 has two GPUs of 16 units with pods a (10)
/// and b (4); n2 has one GPU, which pod c fills. These pods have priority 0.
fn urgent(units: u64) -> Value {
    let mut pod = pod_manifest("urgent", units);
    pod["spec"]["priority"] = json!(1000);
    pod
}

fn uid(cluster: &Cluster, name: &str) -> String {
    let pod = cluster.api.get("pods", "default", name).expect("there");
    pod["metadata"]["uid"].as_str().expect("a UID").to_owned()
}

#[tokio::test]
async fn victims_are_corrected_and_useless_nodes_left_out() {
    let cluster = Cluster::fixture().await;
    let [a, b, c] = ["a", "b", "c"].map(|name| uid(&cluster, name));
    let meta = |uids: &[&String], violations: u64| {
        let pods: Vec<Value> = uids.iter().map(|uid| json!({"UID": uid})).collect();
        json!({"Pods": pods, "NumPDBViolations": violations})
    };
    let ask =
        |units: u64, victims: Value| json!({"Pod": urgent(units), "NodeNameToVictims": null, "NodeNameToMetaVictims": victims});
    // By the node's sum, evicting a would make room for 14. But only b makes 14 free on one GPU, and so does c on its node.
    let proposed = json!({"n1": meta(&[&b], 1), "n2": meta(&[&c], 0), "n3": meta(&[&a], 0), "nx": meta(&[&a], 0)});
    let answer = cluster.json(PREEMPT, ask(14, proposed)).await;
    let expected = json!({"NodeNameToMetaVictims": {"n1": meta(&[&b], 1), "n2": meta(&[&c], 0)}});
    assert_eq!(answer, expected);
    let answer = cluster.json(PREEMPT, ask(14, json!({"n1": meta(&[&a], 0)}))).await;
    assert_eq!(
        answer,
        json!({"NodeNameToMetaVictims": {"n1": meta(&[&a], 0)}}),
        "what is proposed is enough"
    );
    let answer = cluster.json(PREEMPT, ask(17, json!({"n1": meta(&[&a, &b], 0)}))).await;
    assert_eq!(answer, json!({"NodeNameToMetaVictims": {}}), "no GPU is that large");
    // Whole pods, as sent without nodeCacheCapable.
    let whole =
        json!({"n2": {"Pods": [{"metadata": {"name": "c", "uid": c}, "spec": {"containers": []}}], "NumPDBViolations": 0}});
    let body = json!({"Pod": urgent(14), "NodeNameToVictims": whole, "NodeNameToMetaVictims": null});
    assert_eq!(
        cluster.json(PREEMPT, body).await,
        json!({"NodeNameToMetaVictims": {"n2": meta(&[&c], 0)}})
    );
}

#[tokio::test]
async fn a_request_that_cannot_be_read_evicts_nobody() {
    let cluster = Cluster::fixture().await;
    for body in [
        "",
        "{}",
        r#"{"Pod":{"metadata":{},"spec":{"containers":[]}}}"#,
        r#"{"Pod":7,"NodeNameToMetaVictims":{}}"#,
    ] {
        let (status, text) = cluster.ask("POST", PREEMPT, body).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{body}: {text}");
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        assert!(answer["error"].as_str().is_some_and(|text| !text.is_empty()), "{text}");
    }
}
