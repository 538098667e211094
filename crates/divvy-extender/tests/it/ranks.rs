//! The choice of node and GPU: prioritize, filter with `--decide-in filter`, and bind.

use std::collections::BTreeMap;

use axum::http::StatusCode;
use divvy_extender::{DecideIn, ExtenderSettings, PlacementRules};
use divvy_policy::Policy;
use serde_json::{Value, json};

use crate::server::*;

const FILTER: &str = "/gpushare-scheduler/filter";
const PRIORITIZE: &str = "/gpushare-scheduler/prioritize";

/// gpushare's fixture. n1: 6 and 12 units free. n2: full. n3: no GPU. n4: four GPUs with 16 each.
async fn fixture(placement: PlacementRules) -> Cluster {
    Cluster::fixture_with(ExtenderSettings { placement, ..settings() }).await
}

fn by(policy: Policy) -> PlacementRules {
    PlacementRules {
        policy,
        ..PlacementRules::default()
    }
}

async fn scores(cluster: &Cluster, pod: &Value, nodes: &[&str]) -> BTreeMap<String, i64> {
    let answer = cluster.json(PRIORITIZE, json!({"Pod": pod, "NodeNames": nodes})).await;
    let list = answer.as_array().expect("a list").iter();
    let one = |entry: &Value| {
        assert_eq!(entry.as_object().map(|fields| fields.len()), Some(2), "{entry}");
        let host = entry["Host"].as_str().expect("a name").to_owned();
        (host, entry["Score"].as_i64().expect("a number"))
    };
    list.map(one).collect()
}

#[tokio::test]
async fn the_best_node_gets_ten_and_no_other_more_than_five() {
    for (policy, best) in [
        (Policy::Divvy, "n1"),
        (Policy::BestFit, "n1"),
        (Policy::GpuPacking, "n1"),
        (Policy::Spread, "n4"),
    ] {
        let cluster = fixture(by(policy)).await;
        let found = scores(&cluster, &pod_manifest("q", 6), &["n4", "n1"]).await;
        let other = if best == "n1" { "n4" } else { "n1" };
        assert_eq!(found[best], 10, "{policy}: {found:?}");
        assert!((0..=5).contains(&found[other]), "{policy}: {found:?}");
        // Nodes that should not be in the request: all get a score, as kube-scheduler expects.
        let found = scores(&cluster, &pod_manifest("q", 13), &["n1", "n2", "n3", "n4", "nx"]).await;
        let expected = [("n1", 0), ("n2", 0), ("n3", 0), ("n4", 10), ("nx", 0)];
        assert_eq!(found, expected.map(|(name, score)| (name.to_owned(), score)).into());
    }
}

/// A request with node objects is as good as a request with node names.
#[tokio::test]
async fn scores_come_as_go_reads_them() {
    let cluster = fixture(PlacementRules::default()).await;
    let node = |name: &str| json!({"metadata": {"name": name}});
    let body = json!({"pod": pod_manifest("q", 6), "nodes": {"items": [node("n1"), node("n4")]}});
    let (status, text) = cluster.ask("POST", PRIORITIZE, body.to_string()).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(text, r#"[{"Host":"n1","Score":10},{"Host":"n4","Score":0}]"#);
    assert_eq!(
        cluster
            .json(PRIORITIZE, json!({"Pod": pod_manifest("q", 6), "NodeNames": []}))
            .await,
        json!([])
    );
}

#[tokio::test]
async fn what_cannot_be_ranked_is_an_error_of_the_call() {
    let cluster = fixture(PlacementRules::default()).await;
    for (body, status) in [("{}", StatusCode::BAD_REQUEST), ("[", StatusCode::BAD_REQUEST)] {
        let (found, text) = cluster.ask("POST", PRIORITIZE, body).await;
        assert_eq!(found, status, "{text}");
        let error: Value = serde_json::from_str(&text).expect("JSON");
        assert!(error["error"].as_str().is_some_and(|text| !text.is_empty()), "{text}");
    }
    assert_eq!(cluster.ask("GET", PRIORITIZE, "").await.0, StatusCode::METHOD_NOT_ALLOWED);
}

/// The answer gives no reason against the other nodes that fit.
#[tokio::test]
async fn a_deciding_filter_passes_only_the_best_node() {
    let decide_in = DecideIn::Filter;
    for (policy, best) in [(Policy::Divvy, "n1"), (Policy::Spread, "n4")] {
        let cluster = fixture(PlacementRules { policy, decide_in }).await;
        for nodes in [["n1", "n2", "n4"], ["n4", "n2", "n1"]] {
            let answer = cluster
                .json(FILTER, json!({"Pod": pod_manifest("q", 6), "NodeNames": nodes}))
                .await;
            assert_eq!(answer["NodeNames"], json!([best]), "{policy}: {answer}");
            let failed = json!({"n2": "Insufficient GPU Memory in one device"});
            assert_eq!(answer["FailedNodes"], failed, "{policy}");
        }
        let nowhere = json!({"Pod": pod_manifest("q", 17), "NodeNames": ["n1", "n4"]});
        let answer = cluster.json(FILTER, nowhere).await;
        assert_eq!(
            answer["FailedNodes"].as_object().map(|failed| failed.len()),
            Some(2),
            "{answer}"
        );
    }
}

#[tokio::test]
async fn bind_takes_the_gpu_that_the_policy_chooses() {
    for (policy, index) in [(Policy::Divvy, "0"), (Policy::BestFit, "0"), (Policy::Spread, "1")] {
        let cluster = fixture(by(policy)).await;
        let pod = cluster.api.create("pods", pod_manifest("q", 6)).expect("created");
        assert_eq!(cluster.bind(&pod, "n1").await, "", "{policy}");
        let bound = cluster.api.get("pods", "default", "q").expect("there");
        assert_eq!(bound["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"], index, "{policy}");
    }
}

#[tokio::test]
async fn calls_are_counted_by_verb() {
    let cluster = fixture(PlacementRules::default()).await;
    scores(&cluster, &pod_manifest("q", 6), &["n1", "n4"]).await;
    let (_, text) = cluster.ask("GET", "/metrics", "").await;
    let line = r#"divvy_extender_request_duration_seconds_count{verb="prioritize"} 1"#;
    assert!(text.contains(line), "{text}");
}
