//! The JSON of kube-scheduler's and gpushare's protocols. Case numbers are those of `docs/compatibility/gpushare.md`.

use axum::body::Body;
use axum::http::{Request, StatusCode, header};
use divvy_testbed::api::DeleteOptions;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};
use tower::ServiceExt as _;

use crate::server::*;

const FILTER: &str = "/gpushare-scheduler/filter";
const BIND: &str = "/gpushare-scheduler/bind";

fn failed(nodes: &[(&str, &str)]) -> Value {
    nodes
        .iter()
        .map(|(node, text)| ((*node).to_owned(), json!(text)))
        .collect::<serde_json::Map<_, _>>()
        .into()
}

const INSUFFICIENT: &str = "Insufficient GPU Memory in one device";

/// The pod asks whether the extender is called.
#[tokio::test]
async fn a_check_pod_is_answered_and_fits_nowhere() {
    let cluster = Cluster::fixture().await;
    let asking = |word: &str| {
        let mut pod = pod_manifest("q", 1);
        pod["metadata"]["annotations"] = json!({ divvy_extender::SCHEDULER_CHECK: word });
        json!({"Pod": pod, "NodeNames": ["n1"]})
    };
    let answer = cluster.json(FILTER, asking("0f1e2d3c4b5a6978")).await;
    let error = answer["Error"].as_str().unwrap_or_default();
    assert!(error.contains("check 0f1e2d3c4b5a6978"), "{answer}");
    assert_eq!(answer["NodeNames"], json!(null), "{answer}");
    // A value that `divvy scheduler-config` does not write changes nothing.
    let answer = cluster.json(FILTER, asking("please \n")).await;
    assert_eq!(answer["NodeNames"], json!(["n1"]), "{answer}");
}

/// The answer says how to turn the webhook on.
#[tokio::test]
async fn the_webhook_is_off_unless_asked_for() {
    let cluster = Cluster::fixture().await;
    let (status, text) = cluster.ask("POST", "/mutate/divvy-scheduler", "{}".to_owned()).await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    assert!(text.contains("--webhook") && text.contains("extender.webhook=true"), "{text}");
}

#[tokio::test]
async fn filter_answers_names_with_names() {
    let cluster = Cluster::fixture().await;
    // Case 1, byte for byte as Go prints it.
    let body = json!({"Pod": pod_manifest("q", 8), "Nodes": null, "NodeNames": ["n1", "n2", "n3", "nx"]}).to_string();
    let (status, text) = cluster.ask("POST", FILTER, body).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        text,
        r#"{"Nodes":null,"NodeNames":["n1"],"FailedNodes":{"n2":"Insufficient GPU Memory in one device","n3":"The node n3 is not for GPU share, need skip","nx":"node \"nx\" not found"},"FailedAndUnresolvableNodes":null,"Error":""}"#
    );
    // Cases 2, 3, 7
    for (pod, passed) in [
        (pod_manifest("q", 13), json!([])),
        (pod_manifest("q", 12), json!(["n1"])),
        (
            json!({"metadata": {"name": "q"}, "spec": {"containers": [
                {"name": "a", "resources": {"limits": {"aliyun.com/gpu-mem": "5"}}},
                {"name": "b", "resources": {"limits": {"aliyun.com/gpu-mem": 5}}},
                {"name": "c"}]}}),
            json!(["n1"]),
        ),
    ] {
        let answer = cluster.json(FILTER, json!({"Pod": pod, "NodeNames": ["n1"]})).await;
        assert_eq!(answer["NodeNames"], passed, "{answer}");
        let expected = if passed == json!([]) {
            failed(&[("n1", INSUFFICIENT)])
        } else {
            json!({})
        };
        assert_eq!(answer["FailedNodes"], expected);
    }
}

#[tokio::test]
async fn a_config_map_takes_gpus_out_and_its_end_gives_them_back() {
    // Case 8: on n1 (6 and 12 units free) only GPU 0 is left.
    let cluster = Cluster::fixture().await;
    let ask = json!({"Pod": pod_manifest("q", 8), "NodeNames": ["n1"]});
    for (gpus, passes) in [
        ("1", false),
        ("", true),
        ("0,1", false),
        (" 1 , x", false),
        ("x", true),
        ("0", true),
    ] {
        let map = json!({
            "apiVersion": "v1", "kind": "ConfigMap",
            "metadata": {"name": "unhealthy-gpu-n1", "namespace": "kube-system"}, "data": {"gpus": gpus},
        });
        cluster.api.create("configmaps", map).expect("created");
        cluster.filters(&ask, passes).await;
        cluster
            .api
            .delete("configmaps", "kube-system", "unhealthy-gpu-n1", &DeleteOptions::default())
            .expect("deleted");
        cluster.filters(&ask, true).await;
    }
}

/// The filter accepts JSON keys in upper and lower case.
#[tokio::test]
async fn filter_returns_node_objects_as_they_came() {
    // Case 5
    let cluster = Cluster::fixture().await;
    let node = |name: &str| format!(r#"{{"metadata":{{"name":"{name}","unknown":1.50}},"spec":{{}},"status":{{"x":[ 1 ]}}}}"#);
    let pod = pod_manifest("q", 8);
    for (pod_key, nodes_key, extra) in [
        ("Pod", "Nodes", r#","NodeNames":null"#),
        ("pod", "nodes", ""),
        ("POD", "nOdEs", ""),
    ] {
        let body = format!(
            r#"{{"{pod_key}":{pod},"{nodes_key}":{{"metadata":{{}},"items":[{},{}]}}{extra}}}"#,
            node("n1"),
            node("n2")
        );
        let (_, text) = cluster.ask("POST", FILTER, body).await;
        let expected = format!(
            r#"{{"Nodes":{{"metadata":{{}},"items":[{}]}},"NodeNames":["n1"],"FailedNodes":{{"n2":"{INSUFFICIENT}"}},"FailedAndUnresolvableNodes":null,"Error":""}}"#,
            node("n1")
        );
        assert_eq!(text, expected);
    }
    let body = json!({"pod": pod, "nodes": {"items": [{"metadata": {"name": "n2"}}]}});
    let answer = cluster.json(FILTER, body).await;
    assert_eq!(answer["Nodes"], json!({"metadata": {}, "items": null}));
    let answer = cluster.json(FILTER, json!({"pod": pod, "nodenames": ["n1"]})).await;
    assert_eq!((&answer["Nodes"], &answer["NodeNames"]), (&Value::Null, &json!(["n1"])));
    let answer = cluster.json(FILTER, json!({"Pod": pod, "NodeNames": []})).await;
    assert_eq!((&answer["NodeNames"], &answer["Error"]), (&json!([]), &json!("")));
}

#[tokio::test]
async fn what_is_missing_is_said_in_gpushares_words() {
    // Case 6
    let cluster = Cluster::fixture().await;
    let pod = pod_manifest("q", 8);
    for (body, error) in [
        (json!({}), "arg or pod is nil"),
        (json!({"Pod": null, "NodeNames": ["n1"]}), "arg or pod is nil"),
        (json!({"Pod": pod}), "cannot get node names"),
        (json!({"Pod": pod, "Nodes": null, "NodeNames": null}), "cannot get node names"),
    ] {
        let answer = cluster.json(FILTER, body).await;
        assert_eq!(
            answer,
            json!({"Nodes": null, "NodeNames": null, "FailedNodes": null, "FailedAndUnresolvableNodes": null, "Error": error})
        );
    }
}

#[tokio::test]
async fn malformed_requests_get_an_error_in_words_and_status_200() {
    let cluster = Cluster::fixture().await;
    let deep = "[".repeat(100_000);
    let long = format!(r#"{{"PodName":"{}"}}"#, "a".repeat(1 << 20));
    let quantity = |text: &str| {
        json!({"Pod": {"metadata": {"name": "q"}, "spec": {"containers": [
            {"name": "a", "resources": {"limits": {"aliyun.com/gpu-mem": text}}}]}}, "NodeNames": ["n1"]})
        .to_string()
    };
    let corpus = [
        String::new(),
        " ".to_owned(),
        "null".to_owned(),
        "0".to_owned(),
        "[]".to_owned(),
        "\"".to_owned(),
        "{".to_owned(),
        r#"{"Pod":"#.to_owned(),
        r#"{"Pod":{}}"#.to_owned(),
        r#"{"Pod":[],"NodeNames":["n1"]}"#.to_owned(),
        r#"{"Pod":{"metadata":{"name":1},"spec":{}},"NodeNames":["n1"]}"#.to_owned(),
        r#"{"Pod":{"metadata":{},"spec":{"containers":7}},"NodeNames":["n1"]}"#.to_owned(),
        r#"{"Pod":{"metadata":{},"spec":{"containers":[]}},"NodeNames":{}}"#.to_owned(),
        r#"{"Pod":{"metadata":{},"spec":{"containers":[]}},"NodeNames":[1]}"#.to_owned(),
        r#"{"Pod":{"metadata":{},"spec":{"containers":[]}},"Nodes":{"items":[{}]}}"#.to_owned(),
        r#"{"Pod":{"metadata":{},"spec":{"containers":[]}},"NodeNames":["n1","n2","n1"]}"#.to_owned(),
        r#"{"PodName":7}"#.to_owned(),
        r#"{"PodName":"../../nodes/n1","PodNamespace":"default","PodUID":"u","Node":"n1"}"#.to_owned(),
        r#"{"PodName":"q","PodNamespace":"a/b","PodUID":"u","Node":"n1"}"#.to_owned(),
        r#"{"PodName":"q","PodNamespace":"default","PodUID":"u","Node":""}"#.to_owned(),
        r#"{"PodName":"no-such","PodNamespace":"default","PodUID":"u","Node":"n1"}"#.to_owned(),
        quantity("3 GiB"),
        quantity("-1"),
        quantity("99999999999999999999"),
        deep,
        long,
    ];
    for path in [FILTER, BIND] {
        for body in &corpus {
            let (status, text) = cluster.ask("POST", path, body.clone()).await;
            let shown: String = body.chars().take(80).collect();
            assert_eq!(status, StatusCode::OK, "{path} {shown}");
            let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
            assert!(
                answer["Error"].as_str().is_some_and(|error| error.len() > 10),
                "{path} {shown}: {text}"
            );
        }
        let (status, text) = cluster.ask("POST", path, vec![0xff, 0xfe, b'{']).await;
        assert_eq!(status, StatusCode::OK);
        assert!(text.contains("not a JSON object"), "{text}");
    }
    let answer = cluster
        .json(FILTER, serde_json::from_str(&quantity("3 GiB")).expect("JSON"))
        .await;
    assert_eq!(
        answer["Error"],
        "aliyun.com/gpu-mem: in container a of pod q: quantity: \"3 GiB\" has an unknown suffix"
    );
    assert_eq!(cluster.used("n1").await, [10, 4], "nothing was changed by any of it");
}

#[tokio::test]
async fn other_paths_methods_and_sizes_are_refused_as_http_does() {
    let cluster = Cluster::fixture().await;
    for (method, path, status) in [
        ("GET", FILTER, StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/gpushare-scheduler/inspect", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/gpushare-scheduler/score", StatusCode::NOT_FOUND),
        ("GET", "/", StatusCode::NOT_FOUND),
        ("GET", "/debug/pprof/", StatusCode::NOT_FOUND),
    ] {
        let (found, text) = cluster.ask(method, path, "{}").await;
        assert_eq!(found, status, "{method} {path}");
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        assert!(answer["error"].is_string(), "{text}");
    }
    for path in [FILTER, BIND] {
        let (status, text) = cluster.ask("POST", path, vec![b' '; (64 << 20) + 1]).await;
        assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
        let answer: Value = serde_json::from_str(&text).expect("JSON");
        assert!(
            answer["Error"].as_str().is_some_and(|error| error.contains("64 MiB")),
            "{text}"
        );
    }
}

#[tokio::test]
async fn inspect_and_version_are_gpushares() {
    // Case 23
    let cluster = Cluster::fixture().await;
    let (_, text) = cluster.ask("GET", "/gpushare-scheduler/inspect/n1", "").await;
    assert_eq!(
        text,
        r#"{"nodes":[{"name":"n1","totalGPU":32,"usedGPU":14,"devs":[{"id":0,"totalGPU":16,"usedGPU":10,"pods":[{"name":"a","namespace":"default","usedGPU":10}]},{"id":1,"totalGPU":16,"usedGPU":4,"pods":[{"name":"b","namespace":"default","usedGPU":4}]}]}]}"#
    );
    let (status, text) = cluster.ask("GET", "/gpushare-scheduler/inspect/nx", "").await;
    assert_eq!(
        (status, text.as_str()),
        (StatusCode::OK, r#"{"nodes":null,"error":"node \"nx\" not found"}"#)
    );
    let (_, text) = cluster.ask("GET", "/gpushare-scheduler/inspect", "").await;
    let names: Vec<Value> = serde_json::from_str::<Value>(&text).expect("JSON")["nodes"]
        .as_array()
        .expect("nodes")
        .iter()
        .map(|node| node["name"].clone())
        .collect();
    assert_eq!(names, ["n1", "n2", "n4"], "nodes with GPUs, in order");
    let (_, text) = cluster.ask("GET", "/gpushare-scheduler/inspect/n3", "").await;
    assert_eq!(text, r#"{"nodes":[{"name":"n3","totalGPU":0,"usedGPU":0,"devs":[]}]}"#);
    assert_eq!(cluster.ask("GET", "/version", "").await.1, "0.1.0");
}

#[tokio::test]
async fn metrics_count_what_happened() {
    let cluster = Cluster::fixture().await;
    cluster
        .json(FILTER, json!({"Pod": pod_manifest("q", 8), "NodeNames": ["n1"]}))
        .await;
    cluster.json(BIND, json!({})).await;
    let (_, text) = cluster.ask("GET", "/metrics", "").await;
    for line in [
        "divvy_extender_request_duration_seconds_count{verb=\"filter\"} 1",
        "divvy_extender_request_duration_seconds_count{verb=\"bind\"} 1",
        "divvy_extender_binds_total{outcome=\"bound\"} 0",
        "divvy_extender_watch_lists_total{resource=\"pods\"} 1",
        "divvy_ledger_nodes{source=\"division\"} 3",
        "divvy_ledger_nodes{source=\"unusable\"} 1",
        "divvy_ledger_anomalies{kind=\"overcommitted\"} 0",
        "divvy_ledger_overcommit_mebibytes 0",
        "divvy_ledger_overcommit_bytes 0",
        "divvy_pods_waiting{reason=\"no_room\"} 0",
        "divvy_pod_wait_seconds_count 0",
        "divvy_ledger_reservations 0",
        "divvy_ledger_pods 3",
        "divvy_extender_synced 1",
    ] {
        assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
    }
    assert_eq!(text.matches("# EOF").count(), 0, "this is not OpenMetrics");
}

#[tokio::test]
async fn each_client_gets_the_metrics_in_the_format_that_it_asks_for() {
    let cluster = Cluster::fixture().await;
    let scrape = async |accept: Option<&str>| {
        let request = accept.into_iter().fold(Request::get("/metrics"), |request, value| {
            request.header(header::ACCEPT, value)
        });
        let request = request.body(Body::empty()).expect("a request");
        let response = cluster
            .served
            .router
            .clone()
            .oneshot(request)
            .await
            .expect("a router cannot fail");
        let kind = response.headers()[header::CONTENT_TYPE].to_str().expect("text").to_owned();
        let body = response.into_body().collect().await.expect("a body").to_bytes();
        (kind, String::from_utf8(body.to_vec()).expect("UTF-8"))
    };
    for accept in [None, Some("*/*")] {
        let (kind, text) = scrape(accept).await;
        assert_eq!(kind, "text/plain; version=0.0.4; charset=utf-8");
        assert!(text.contains("# TYPE divvy_extender_binds_total counter\n"), "{text}");
        assert!(!text.contains("# EOF"), "{text}");
    }
    let (kind, text) = scrape(Some(
        "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5",
    ))
    .await;
    assert_eq!(kind, "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(text.contains("# TYPE divvy_extender_binds counter\n"), "{text}");
    assert_eq!(text.matches("# EOF").count(), 1);
    assert!(text.ends_with("# EOF\n"));
}
