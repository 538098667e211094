//! The whole extender with the embedded API server: watches, real requests, faults. Case numbers are those of `docs/compatibility/gpushare.md`, R
//! numbers those of `docs/compatibility/races.md`. F numbers are faults. F02: the answer to a POST comes after the client's timeout. F04: the watch
//! is cut, and a resume gets 410 Gone. F08: kube-scheduler sends the same bind many times at once.

use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::http::{Request, StatusCode};
use divvy_extender::{ExtenderLimits, ExtenderSettings, ExtenderSurroundings, Served, run_with, serve};
use divvy_model::MemoryUnit;
use divvy_testbed::api::{ApiServer, ApiServerOptions, DeleteOptions, Effect, FaultRule, Match, PatchKind, RuleId};
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt;

/// An extender and its API server. Both stop when this is dropped.
pub(crate) struct Cluster {
    pub(crate) api: ApiServer,
    pub(crate) served: Served,
    _stop: DropGuard,
}

pub(crate) fn settings() -> ExtenderSettings {
    let mut settings = ExtenderSettings::new(MemoryUnit::GIB);
    // No other extender binds, so there is no need for the settle second.
    settings.timing.settle_ns = 0;
    settings.limits = ExtenderLimits {
        post: Duration::from_millis(150),
        get: Duration::from_millis(150),
        sweep: Duration::from_millis(50),
    };
    settings
}

impl Cluster {
    pub(crate) async fn new() -> Cluster {
        Cluster::on(ApiServer::new(ApiServerOptions {
            seed: Some(1),
            ..ApiServerOptions::default()
        }))
        .await
    }

    pub(crate) async fn on(api: ApiServer) -> Cluster {
        Cluster::with(api, settings()).await
    }

    pub(crate) async fn with(api: ApiServer, settings: ExtenderSettings) -> Cluster {
        let stop = CancellationToken::new();
        let served = serve(api.client(), settings, stop.clone());
        let cluster = Cluster {
            api,
            served,
            _stop: stop.drop_guard(),
        };
        cluster.eventually("/readyz", |status, _| status == StatusCode::OK).await;
        cluster
    }

    /// Wait until the extender is ready.
    pub(crate) async fn becomes_ready(served: &Served) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let (status, text) = send(&served.router, "GET", "/readyz", "").await;
            if status == StatusCode::OK {
                return;
            }
            assert!(Instant::now() < deadline, "not ready: {text}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// gpushare's fixture (see `docs/compatibility/gpushare.md`).
    pub(crate) async fn fixture() -> Cluster {
        Cluster::fixture_with(settings()).await
    }

    /// Make gpushare's fixture with these settings for the extender.
    pub(crate) async fn fixture_with(settings: ExtenderSettings) -> Cluster {
        let api = ApiServer::new(ApiServerOptions {
            seed: Some(1),
            ..ApiServerOptions::default()
        });
        for (name, units, gpus) in [("n1", 32, 2), ("n2", 16, 1), ("n3", 0, 0), ("n4", 64, 4)] {
            create_node(&api, name, units, gpus);
        }
        for (name, node, index, units) in [("a", "n1", 0, 10), ("b", "n1", 1, 4), ("c", "n2", 0, 16)] {
            create_placed(&api, name, node, index, units);
        }
        Cluster::with(api, settings).await
    }

    pub(crate) async fn ask(&self, method: &str, path: &str, body: impl Into<Body>) -> (StatusCode, String) {
        send(&self.served.router, method, path, body).await
    }

    pub(crate) async fn json(&self, path: &str, body: Value) -> Value {
        let (status, text) = self.ask("POST", path, body.to_string()).await;
        assert_eq!(status, StatusCode::OK, "{text}");
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// Wait until filter passes the expected nodes for the pod.
    pub(crate) async fn filters(&self, request: &Value, passes: bool) {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let answer = self.json("/gpushare-scheduler/filter", request.clone()).await;
            if answer["NodeNames"].as_array().is_some_and(|names| names.is_empty() != passes) {
                return;
            }
            assert!(Instant::now() < deadline, "still {answer}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    pub(crate) async fn bind(&self, pod: &Value, node: &str) -> String {
        let answer = self.json("/gpushare-scheduler/bind", bind_args(pod, node)).await;
        answer["Error"].as_str().expect("always there").to_owned()
    }

    /// Used units per GPU, as inspect shows them.
    pub(crate) async fn used(&self, node: &str) -> Vec<u64> {
        let (_, text) = self.ask("GET", &format!("/gpushare-scheduler/inspect/{node}"), "").await;
        let report: Value = serde_json::from_str(&text).expect("JSON");
        let devices = report["nodes"][0]["devs"].as_array().cloned().unwrap_or_default();
        devices.iter().filter_map(|dev| dev["usedGPU"].as_u64()).collect()
    }

    pub(crate) async fn eventually(&self, path: &str, mut holds: impl FnMut(StatusCode, &str) -> bool) -> String {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let (status, text) = self.ask("GET", path, "").await;
            if holds(status, &text) {
                return text;
            }
            assert!(Instant::now() < deadline, "{path} stays {status}: {text}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// End the watch of pods. It cannot be resumed until the rule is removed.
    async fn break_watch_of_pods(&self) -> RuleId {
        let broken = self.api.faults().add(FaultRule::new(
            Match::any().verb("watch").resource("pods"),
            Effect::Refuse(500),
        ));
        self.api.faults().cut_watches();
        self.eventually("/readyz", |_, text| text.contains("pods: listed; the watch is broken"))
            .await;
        broken
    }

    /// Return the value of a metric in `/metrics`.
    pub(crate) async fn metric(&self, line: &str) -> Option<f64> {
        let (_, text) = self.ask("GET", "/metrics", "").await;
        text.lines().find_map(|found| found.strip_prefix(line)?.trim().parse().ok())
    }

    async fn used_becomes(&self, node: &str, expected: &[u64]) {
        let path = format!("/gpushare-scheduler/inspect/{node}");
        let read = |text: &str| -> Vec<u64> {
            let report: Value = serde_json::from_str(text).expect("JSON");
            let devices = report["nodes"][0]["devs"].as_array().cloned().unwrap_or_default();
            devices.iter().filter_map(|dev| dev["usedGPU"].as_u64()).collect()
        };
        self.eventually(&path, |_, text| read(text) == expected).await;
    }
}

pub(crate) async fn send(router: &Router, method: &str, path: &str, body: impl Into<Body>) -> (StatusCode, String) {
    let request = Request::builder()
        .method(method)
        .uri(path)
        .body(body.into())
        .expect("a request");
    let response = router.clone().oneshot(request).await.expect("a router cannot fail");
    let status = response.status();
    let bytes = response.into_body().collect().await.expect("a body").to_bytes();
    (status, String::from_utf8(bytes.to_vec()).expect("UTF-8"))
}

pub(crate) fn bind_args(pod: &Value, node: &str) -> Value {
    let meta = &pod["metadata"];
    json!({"PodName": meta["name"], "PodNamespace": meta["namespace"], "PodUID": meta["uid"], "Node": node})
}

pub(crate) fn pod_manifest(name: &str, units: u64) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"containers": [{"name": "main", "image": "x", "resources": {"limits": {"aliyun.com/gpu-mem": units.to_string()}}}]}
    })
}

pub(crate) fn create_pod(api: &ApiServer, name: &str, units: u64) -> Value {
    api.create("pods", pod_manifest(name, units)).expect("a legal pod")
}

/// A running pod that gpushare placed.
pub(crate) fn create_placed(api: &ApiServer, name: &str, node: &str, index: u32, units: u64) -> Value {
    let mut pod = pod_manifest(name, units);
    pod["spec"]["nodeName"] = json!(node);
    pod["metadata"]["annotations"] = json!({
        "ALIYUN_COM_GPU_MEM_IDX": index.to_string(), "ALIYUN_COM_GPU_MEM_POD": units.to_string(),
        "ALIYUN_COM_GPU_MEM_DEV": "16", "ALIYUN_COM_GPU_MEM_ASSIGNED": "true", "ALIYUN_COM_GPU_MEM_ASSUME_TIME": "1"});
    api.create("pods", pod).expect("a legal pod");
    set_status(api, name, json!({"phase": "Running"}))
}

fn set_status(api: &ApiServer, name: &str, status: Value) -> Value {
    api.patch("pods/status", "default", name, PatchKind::Merge, &json!({ "status": status }))
        .expect("a legal status")
}

pub(crate) fn create_node(api: &ApiServer, name: &str, units: u64, gpus: u64) {
    api.create("nodes", json!({"metadata": {"name": name}}))
        .expect("a legal node");
    set_capacity(api, name, units, gpus);
}

fn set_capacity(api: &ApiServer, name: &str, units: u64, gpus: u64) {
    let amounts = json!({"aliyun.com/gpu-mem": units.to_string(), "aliyun.com/gpu-count": gpus.to_string()});
    let status = json!({"status": {"capacity": amounts, "allocatable": amounts}});
    api.patch("nodes/status", "", name, PatchKind::Merge, &status)
        .expect("a legal status");
}

fn now() -> DeleteOptions {
    DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    }
}

/// Return the number of writes to a pod so far.
fn commits(api: &ApiServer, name: &str) -> usize {
    api.history()
        .iter()
        .filter(|event| &*event.resource == "pods" && event.object["metadata"]["name"] == name)
        .count()
}

#[tokio::test]
async fn a_bind_is_exactly_one_write() {
    // Case 13
    let cluster = Cluster::fixture().await;
    let q = create_pod(&cluster.api, "q", 8);
    let before = commits(&cluster.api, "q");
    assert_eq!(cluster.bind(&q, "n1").await, "");
    assert_eq!(
        commits(&cluster.api, "q"),
        before + 1,
        "annotations and node in one transaction"
    );
    let stored = cluster.api.get("pods", "default", "q").expect("there");
    assert_eq!(stored["spec"]["nodeName"], "n1");
    let annotation = |name: &str| {
        stored["metadata"]["annotations"][format!("ALIYUN_COM_GPU_MEM_{name}")]
            .as_str()
            .unwrap_or("")
            .to_owned()
    };
    assert_eq!(["IDX", "DEV", "POD", "ASSIGNED"].map(annotation), ["1", "16", "8", "false"]);
    assert_eq!(annotation("ASSUME_TIME").len(), 19);
    assert_eq!(cluster.used("n1").await, [10, 12]);
    cluster
        .eventually("/metrics", |_, text| text.contains("divvy_ledger_reservations 0"))
        .await;
    assert_eq!(cluster.used("n1").await, [10, 12]);
}

#[tokio::test]
async fn gpu_count_earns_a_warning_event() {
    let cluster = Cluster::fixture().await;
    let mut manifest = pod_manifest("q", 1);
    manifest["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-count"] = json!("2");
    let q = cluster.api.create("pods", manifest).expect("a legal pod");
    assert_eq!(cluster.bind(&q, "n4").await, "");
    let event = cluster
        .api
        .until(Duration::from_secs(5), |api| {
            let events = api.list("events.events.k8s.io", "default").ok()?;
            events.into_iter().find(|event| event["reason"] == "GpuCountHasNoEffect")
        })
        .await
        .expect("an event");
    assert_eq!(
        (&event["type"], &event["regarding"]["name"]),
        (&json!("Warning"), &json!("q"))
    );
}

#[tokio::test]
async fn fifty_equal_binds_are_one_write_and_equal_answers() {
    // F08
    let cluster = Cluster::fixture().await;
    let q = create_pod(&cluster.api, "q", 8);
    let before = commits(&cluster.api, "q");
    let answers = futures::future::join_all((0..50).map(|_| cluster.bind(&q, "n1"))).await;
    assert_eq!(answers, vec![String::new(); 50]);
    assert_eq!(commits(&cluster.api, "q"), before + 1);
}

#[tokio::test]
async fn an_answer_that_is_lost_is_found_out() {
    // F02 with real connections; each case leaves exactly one Binding and one allocation.
    let binding = || Match::any().verb("create").resource("pods/binding");
    for (effect, first) in [
        (Effect::LoseAnswer, ""),
        (Effect::LoseRequest, "gave no usable answer"),
        (Effect::Refuse(500), "gave no usable answer"),
        (Effect::Refuse(403), "refused to bind"),
        (Effect::Refuse(409), "refused to bind"),
        (Effect::Latency(Duration::from_millis(300)), "gave no usable answer"),
    ] {
        let cluster = Cluster::fixture().await;
        let q = create_pod(&cluster.api, "q", 8);
        cluster.api.faults().add(FaultRule::new(binding(), effect.clone()).times(1));
        let answer = cluster.bind(&q, "n1").await;
        assert!(
            answer.contains(first) && answer.is_empty() == first.is_empty(),
            "{effect:?}: {answer}"
        );
        // kube-scheduler tries again.
        let deadline = Instant::now() + Duration::from_secs(5);
        while !cluster.bind(&q, "n1").await.is_empty() {
            assert!(Instant::now() < deadline, "{effect:?}");
        }
        assert_eq!(cluster.used("n1").await, [10, 12], "{effect:?}");
        let stored = cluster.api.get("pods", "default", "q").expect("there");
        assert_eq!(stored["metadata"]["annotations"]["ALIYUN_COM_GPU_MEM_IDX"], "1", "{effect:?}");
        cluster
            .eventually("/metrics", |_, text| text.contains("divvy_ledger_reservations 0"))
            .await;
        assert_eq!(cluster.used("n1").await, [10, 12], "{effect:?}");
    }
}

#[tokio::test]
async fn a_bind_is_answered_in_time_while_the_api_server_is_away() {
    let cluster = Cluster::fixture().await;
    let q = create_pod(&cluster.api, "q", 8);
    cluster.bind(&create_pod(&cluster.api, "warm", 1), "n4").await;
    cluster.api.faults().set_down(true);
    let began = Instant::now();
    let answer = cluster.bind(&q, "n1").await;
    assert!(!answer.is_empty());
    assert!(began.elapsed() < Duration::from_secs(5), "kube-scheduler waits 5 s");
    cluster.api.faults().set_down(false);
    let deadline = Instant::now() + Duration::from_secs(5);
    while !cluster.bind(&q, "n1").await.is_empty() {
        assert!(Instant::now() < deadline);
    }
    cluster.used_becomes("n1", &[10, 12]).await;
}

/// A request to delete the pod does not free its memory.
#[tokio::test]
async fn memory_comes_back_only_after_a_pods_end() {
    // R5, R6's API side, R7
    let cluster = Cluster::new().await;
    create_node(&cluster.api, "n", 16, 1);
    let first = create_pod(&cluster.api, "web-0", 16);
    cluster.used_becomes("n", &[0]).await;
    assert_eq!(cluster.bind(&first, "n").await, "");
    set_status(&cluster.api, "web-0", json!({"phase": "Running"}));
    cluster
        .api
        .delete("pods", "default", "web-0", &DeleteOptions::default())
        .expect("graceful");
    let q = create_pod(&cluster.api, "q", 1);
    cluster
        .eventually("/metrics", |_, text| text.contains("divvy_ledger_pods 2"))
        .await;
    assert!(cluster.bind(&q, "n").await.contains("GPU 0 has 0 of 16384 MiB free"));
    // Deleted by force, and created again with the same name: another pod.
    cluster.api.delete("pods", "default", "web-0", &now()).expect("forced");
    let second = create_pod(&cluster.api, "web-0", 15);
    cluster.used_becomes("n", &[0]).await;
    assert_eq!(cluster.bind(&second, "n").await, "");
    let late = cluster.bind(&first, "n").await;
    assert!(late.starts_with("The pod web-0 in ns default's uid is "), "{late}");
    assert_eq!(cluster.bind(&q, "n").await, "");
    cluster.used_becomes("n", &[16]).await;
    // Case 9
    set_status(&cluster.api, "web-0", json!({"phase": "Succeeded"}));
    cluster.used_becomes("n", &[1]).await;
}

#[tokio::test]
async fn what_happens_while_the_watch_is_cut_is_not_missed() {
    // R14, F04: pods are created, bound by another program, and deleted while no event is delivered; then 410 Gone.
    let cluster = Cluster::fixture().await;
    cluster.api.faults().hold_watches(true);
    cluster.api.delete("pods", "default", "c", &now()).expect("there");
    create_placed(&cluster.api, "new", "n4", 2, 5);
    create_placed(&cluster.api, "gone", "n4", 3, 9);
    cluster.api.delete("pods", "default", "gone", &now()).expect("there");
    create_node(&cluster.api, "n5", 8, 1);
    cluster.api.delete("nodes", "", "n3", &now()).expect("there");
    set_capacity(&cluster.api, "n1", 48, 2);
    cluster.api.faults().compact();
    cluster.api.faults().cut_watches();
    cluster.api.faults().hold_watches(false);
    cluster.used_becomes("n2", &[0]).await;
    cluster.used_becomes("n4", &[0, 0, 5, 0]).await;
    // Cases 20 and 6
    cluster
        .eventually("/gpushare-scheduler/inspect/n1", |_, text| text.contains(r#""totalGPU":48"#))
        .await;
    cluster.used_becomes("n5", &[0]).await;
    cluster
        .eventually("/gpushare-scheduler/inspect/n3", |_, text| {
            text == r#"{"nodes":null,"error":"node \"n3\" not found"}"#
        })
        .await;
}

/// kube-scheduler retries after an error on its own, but after a refusal only when an event arrives. The extender may have missed that event.
#[tokio::test]
async fn a_broken_watch_turns_refusals_into_errors() {
    let cluster = Cluster::fixture().await;
    let pod = create_pod(&cluster.api, "big", 20);
    let question = json!({"Pod": pod, "NodeNames": ["n1", "n2"]});
    let filter = async || cluster.json("/gpushare-scheduler/filter", question.clone()).await;
    let answer = filter().await;
    assert_eq!(
        (
            answer["Error"].as_str(),
            answer["FailedNodes"].as_object().map(|failed| failed.len())
        ),
        (Some(""), Some(2))
    );
    let broken = cluster.break_watch_of_pods().await;
    let error = filter().await["Error"].as_str().map(str::to_owned).unwrap_or_default();
    assert!(
        error.contains("its watch of pods was interrupted") && error.contains("Insufficient GPU Memory in one device"),
        "{error:?}"
    );
    // A pod that fits passes.
    let small = create_pod(&cluster.api, "small", 1);
    let answer = cluster
        .json("/gpushare-scheduler/filter", json!({"Pod": small, "NodeNames": ["n1", "n2"]}))
        .await;
    assert_eq!((answer["Error"].as_str(), &answer["NodeNames"]), (Some(""), &json!(["n1"])));
    cluster.api.faults().remove(broken);
    cluster.eventually("/readyz", |_, text| !text.contains("broken")).await;
    let answer = loop {
        let answer = filter().await;
        if answer["Error"]
            .as_str()
            .is_none_or(|error| !error.contains("only just resumed"))
        {
            break answer;
        }
    };
    assert_eq!(
        (
            answer["Error"].as_str(),
            answer["FailedNodes"].as_object().map(|failed| failed.len())
        ),
        (Some(""), Some(2))
    );
}

/// No event of the pod ever arrives, and nothing else happens that would make kube-scheduler try the waiting pod again.
/// The pod came and went while the watch was broken.
#[tokio::test]
async fn the_next_list_frees_an_unseen_pods_memory() {
    let cluster = Cluster::fixture().await;
    let broken = cluster.break_watch_of_pods().await;
    let pod = create_pod(&cluster.api, "brief", 16);
    assert_eq!(cluster.bind(&pod, "n4").await, "");
    assert_eq!(cluster.used("n4").await, [16, 0, 0, 0]);
    cluster.api.delete("pods", "default", "brief", &now()).expect("deleted");
    cluster.api.faults().compact();
    let began = Instant::now();
    cluster.api.faults().remove(broken);
    cluster.used_becomes("n4", &[0, 0, 0, 0]).await;
    let longest = Duration::from_nanos(settings().timing.unseen_ns);
    assert!(began.elapsed() < longest, "that took {:?}", began.elapsed());
}

#[tokio::test]
async fn a_restart_changes_nothing() {
    // Case 21
    let cluster = Cluster::fixture().await;
    create_placed(&cluster.api, "orphan", "vanished", 0, 3);
    let q = create_pod(&cluster.api, "q", 8);
    assert_eq!(cluster.bind(&q, "n1").await, "");
    let before = cluster
        .eventually("/gpushare-scheduler/inspect", |_, text| text.contains("\"q\""))
        .await;
    let api = cluster.api.clone();
    drop(cluster);
    let again = Cluster::on(api).await;
    let (_, after) = again.ask("GET", "/gpushare-scheduler/inspect", "").await;
    assert_eq!(before, after);
    assert_eq!(again.bind(&q, "n1").await, "", "it is bound there already");
}

/// Until then, the extender answers with the reason.
#[tokio::test]
async fn it_is_unready_until_the_cluster_is_listed() {
    let api = ApiServer::new(ApiServerOptions::default());
    create_node(&api, "n", 16, 1);
    let q = create_pod(&api, "q", 1);
    api.faults().set_down(true);
    let stop = CancellationToken::new();
    let served = serve(api.client(), settings(), stop.clone());
    let (status, text) = send(&served.router, "GET", "/readyz", "").await;
    assert_eq!(
        (status, text.as_str()),
        (
            StatusCode::SERVICE_UNAVAILABLE,
            "pods: not listed yet\nnodes: not listed yet\n"
        )
    );
    assert_eq!(send(&served.router, "GET", "/healthz", "").await.0, StatusCode::OK);
    let (status, text) = send(
        &served.router,
        "POST",
        "/gpushare-scheduler/bind",
        bind_args(&q, "n").to_string(),
    )
    .await;
    assert_eq!(status, StatusCode::OK);
    assert!(text.contains("the extender is starting"), "{text}");
    let body = json!({"Pod": q, "NodeNames": ["n"]}).to_string();
    let (_, text) = send(&served.router, "POST", "/gpushare-scheduler/filter", body).await;
    assert!(text.contains("the extender is starting"), "{text}");
    let cluster = Cluster {
        api,
        served,
        _stop: stop.drop_guard(),
    };
    cluster
        .eventually("/readyz", |_, text| text.contains("the watch is broken: "))
        .await;
    cluster.api.faults().set_down(false);
    cluster.eventually("/readyz", |status, _| status == StatusCode::OK).await;
    assert!(
        cluster
            .metric("divvy_extender_watch_interruptions_total{resource=\"pods\"}")
            .await
            > Some(0.0)
    );
    assert_eq!(cluster.bind(&q, "n").await, "");
}

#[tokio::test]
async fn the_program_listens_serves_and_stops() {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    let api = ApiServer::new(ApiServerOptions::default());
    create_node(&api, "n", 16, 1);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let stop = CancellationToken::new();
    let plain = ExtenderSurroundings::default();
    let program = tokio::spawn(run_with(listener, api.client(), settings(), plain, stop.clone()));
    let get = |path: &'static str| async move {
        let mut stream = tokio::net::TcpStream::connect(address).await.expect("listens");
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("answered");
        answer
    };
    let deadline = Instant::now() + Duration::from_secs(10);
    while !get("/readyz").await.starts_with("HTTP/1.1 200") {
        assert!(Instant::now() < deadline);
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(get("/version").await.ends_with("\r\n\r\n0.1.0"));
    // A connection that stays open does not delay the shutdown.
    let _idle = tokio::net::TcpStream::connect(address).await.expect("listens");
    stop.cancel();
    let ended = tokio::time::timeout(Duration::from_secs(12), program).await.expect("ends");
    ended.expect("no panic").expect("no error");
    assert!(
        tokio::net::TcpStream::connect(address).await.is_err(),
        "the server no longer listens"
    );

    let taken = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let config = divvy_extender::ExtenderConfig {
        kubeconfig: Some("/nonexistent/kubeconfig".into()),
        context: None,
        listen: taken.local_addr().expect("bound"),
        memory_unit: MemoryUnit::GIB,
        placement: divvy_extender::PlacementRules::default(),
        unhealthy_gpu_configmaps: true,
        tls: None,
        client_names: Vec::new(),
        insecure: false,
        webhook: false,
        lease: None,
        web: None,
    };
    let error = divvy_extender::run(config, CancellationToken::new())
        .await
        .expect_err("no kubeconfig");
    assert_eq!(
        error.to_string(),
        "there is no kubeconfig file at /nonexistent/kubeconfig; name one with --kubeconfig or KUBECONFIG"
    );
}
