//! The scheduler loop, tested against an extender of these tests.

mod constraints;

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::extract::State;
use axum::routing::post;
use axum::{Json, Router};
use divvy_testbed::api::{ApiServer, DeleteOptions, Effect, Match, Options, PatchKind, Rule};
use divvy_testbed::scheduler::{Scheduler, SchedulerConfig};
use http::StatusCode;
use serde_json::{Value, json};

const LIMIT: Duration = Duration::from_secs(5);
const MEM: &str = "aliyun.com/gpu-mem";

type Answer = Box<dyn Fn(&Value) -> (StatusCode, Value) + Send>;

struct Stub {
    requests: Vec<(&'static str, Value)>,
    filter: Answer,
    prioritize: Answer,
    preempt: Answer,
    bind: Option<Answer>,
    bind_delay: Duration,
}

#[derive(Clone)]
struct Extender {
    stub: Arc<Mutex<Stub>>,
    api: ApiServer,
    address: SocketAddr,
}

fn ok(value: Value) -> (StatusCode, Value) {
    (StatusCode::OK, value)
}

impl Extender {
    /// Start an extender that accepts every node and binds with an annotation.
    async fn start(api: &ApiServer) -> Extender {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stub = Stub {
            requests: Vec::new(),
            filter: Box::new(|args| ok(json!({"NodeNames": args["NodeNames"], "FailedNodes": {}, "Error": ""}))),
            prioritize: Box::new(|_| ok(json!([]))),
            preempt: Box::new(|args| ok(json!({"NodeNameToMetaVictims": args["NodeNameToMetaVictims"]}))),
            bind: None,
            bind_delay: Duration::ZERO,
        };
        let extender = Extender {
            stub: Arc::new(Mutex::new(stub)),
            api: api.clone(),
            address: listener.local_addr().unwrap(),
        };
        let router = Router::new()
            .route("/e/filter", post(filter))
            .route("/e/prioritize", post(prioritize))
            .route("/e/preempt", post(preempt))
            .route("/e/bind", post(bind))
            .with_state(extender.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        extender
    }

    fn change(&self, change: impl FnOnce(&mut Stub)) {
        change(&mut self.stub.lock().unwrap());
    }

    fn requests(&self, verb: &str) -> Vec<Value> {
        let stub = self.stub.lock().unwrap();
        stub.requests
            .iter()
            .filter(|(of, _)| *of == verb)
            .map(|(_, body)| body.clone())
            .collect()
    }
}

async fn filter(State(extender): State<Extender>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let mut stub = extender.stub.lock().unwrap();
    let (code, answer) = (stub.filter)(&body);
    stub.requests.push(("filter", body));
    (code, Json(answer))
}

async fn prioritize(State(extender): State<Extender>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let mut stub = extender.stub.lock().unwrap();
    let (code, answer) = (stub.prioritize)(&body);
    stub.requests.push(("prioritize", body));
    (code, Json(answer))
}

async fn preempt(State(extender): State<Extender>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let mut stub = extender.stub.lock().unwrap();
    let (code, answer) = (stub.preempt)(&body);
    stub.requests.push(("preempt", body));
    (code, Json(answer))
}

async fn bind(State(extender): State<Extender>, Json(body): Json<Value>) -> (StatusCode, Json<Value>) {
    let delay = {
        let mut stub = extender.stub.lock().unwrap();
        stub.requests.push(("bind", body.clone()));
        if let Some(bind) = &stub.bind {
            let (code, answer) = bind(&body);
            return (code, Json(answer));
        }
        stub.bind_delay
    };
    // A caller that hangs up does not stop the bind.
    let api = extender.api.clone();
    let work = tokio::spawn(async move {
        tokio::time::sleep(delay).await;
        let annotations = json!({"chosen": "1"});
        let binding = json!({
            "metadata": {"name": body["PodName"], "namespace": body["PodNamespace"], "uid": body["PodUID"], "annotations": annotations},
            "target": {"kind": "Node", "name": body["Node"]},
        });
        api.create("pods/binding", binding).err().map(|error| error.to_string())
    });
    let error = work.await.unwrap();
    (StatusCode::OK, Json(json!({"Error": error.unwrap_or_default()})))
}

fn api() -> ApiServer {
    ApiServer::new(Options {
        seed: Some(1),
        ..Options::default()
    })
}

fn node(api: &ApiServer, name: &str, units: u64) {
    let amounts = json!({"cpu": "4", "memory": "8Gi", "pods": "110", MEM: units.to_string()});
    let node = json!({"metadata": {"name": name}});
    api.create("nodes", node).unwrap();
    let status =
        json!({"status": {"capacity": amounts, "allocatable": amounts, "conditions": [{"type": "Ready", "status": "True"}]}});
    api.patch("nodes/status", "", name, PatchKind::Merge, &status).unwrap();
}

fn pod(api: &ApiServer, name: &str, units: u64) {
    let limits = if units == 0 {
        json!({})
    } else {
        json!({MEM: units.to_string()})
    };
    let pod = json!({"metadata": {"name": name}, "spec": {"containers": [{"name": "a", "image": "t:1", "resources": {"limits": limits}}]}});
    api.create("pods", pod).unwrap();
}

fn delete(api: &ApiServer, name: &str) {
    let options = DeleteOptions {
        grace_period_s: Some(0),
        ..DeleteOptions::default()
    };
    api.delete("pods", "default", name, &options).unwrap();
}

pub(crate) async fn pod_until(api: &ApiServer, name: &str, look: impl Fn(&Value) -> bool) -> Value {
    let found = api
        .until(LIMIT, |api| api.get("pods", "default", name).ok().filter(|pod| look(pod)))
        .await;
    found.unwrap_or_else(|| panic!("pod {name}: {:#?}", api.get("pods", "default", name)))
}

async fn bound(api: &ApiServer, name: &str) -> Value {
    pod_until(api, name, |pod| pod["spec"]["nodeName"].is_string()).await
}

/// Wait for a PodScheduled=False condition with this reason. Return its message.
async fn refused(api: &ApiServer, name: &str, reason: &str) -> String {
    let of = |pod: &Value| -> Option<String> {
        let conditions = pod["status"]["conditions"].as_array()?;
        let condition = conditions
            .iter()
            .find(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False")?;
        (condition["reason"] == *reason).then(|| condition["message"].as_str().unwrap_or_default().to_owned())
    };
    let pod = pod_until(api, name, |pod| of(pod).is_some()).await;
    of(&pod).unwrap()
}

pub(crate) async fn event(api: &ApiServer, pod: &str, reason: &str) -> String {
    let found = api
        .until(LIMIT, |api| {
            let events = api.list("events", "default").ok()?;
            let mut of = events
                .into_iter()
                .filter(|event| event["involvedObject"]["name"] == *pod && event["reason"] == *reason);
            of.next()
                .map(|event| event["message"].as_str().unwrap_or_default().to_owned())
        })
        .await;
    found.unwrap_or_else(|| panic!("no event {reason} about {pod}: {:#?}", api.list("events", "default")))
}

fn config(extender: &Extender) -> SchedulerConfig {
    let mut config = SchedulerConfig {
        extender_url: Some(format!("http://{}/e/", extender.address)),
        ..SchedulerConfig::default()
    };
    config.backoff.first = Duration::from_millis(20);
    config.backoff.max = Duration::from_millis(40);
    config
}

#[tokio::test]
async fn a_pod_that_asks_for_a_managed_resource_is_filtered_and_bound_by_the_extender() {
    let api = api();
    let extender = Extender::start(&api).await;
    node(&api, "n1", 16);
    node(&api, "n2", 8);
    let scheduler = Scheduler::start(api.client(), config(&extender));
    pod(&api, "gpu", 12);
    let gpu = bound(&api, "gpu").await;
    assert_eq!(
        (&gpu["spec"]["nodeName"], &gpu["metadata"]["annotations"]["chosen"]),
        (&json!("n1"), &json!("1"))
    );
    assert_eq!(
        event(&api, "gpu", "Scheduled").await,
        "Successfully assigned default/gpu to n1"
    );
    let filter = &extender.requests("filter")[0];
    assert_eq!(
        (&filter["Nodes"], &filter["NodeNames"]),
        (&Value::Null, &json!(["n1"])),
        "node sums come first"
    );
    assert_eq!(filter["Pod"]["metadata"]["name"], "gpu");
    let uid = &gpu["metadata"]["uid"];
    assert_eq!(
        extender.requests("bind")[0],
        json!({"PodName": "gpu", "PodNamespace": "default", "PodUID": uid, "Node": "n1"})
    );
    // The extender does not handle other pods.
    pod(&api, "plain", 0);
    let plain = bound(&api, "plain").await;
    assert_eq!(plain["metadata"]["annotations"]["chosen"], Value::Null);
    assert_eq!(extender.requests("filter").len(), 1);
    scheduler.shutdown().await;
}

#[tokio::test]
async fn a_refusal_aggregates_node_sums_and_the_extenders_reasons_and_ends_with_a_deletion() {
    let api = api();
    let extender = Extender::start(&api).await;
    for (name, units) in [("n1", 40), ("n2", 8), ("n3", 8)] {
        node(&api, name, units);
    }
    let _scheduler = Scheduler::start(api.client(), config(&extender));
    pod(&api, "small", 12);
    bound(&api, "small").await;
    extender.change(|stub| {
        stub.filter = Box::new(|_| {
            ok(json!({"NodeNames": null, "FailedNodes": {"n1": "Insufficient GPU Memory in one device"}, "Error": ""}))
        });
    });
    pod(&api, "large", 20);
    let message = refused(&api, "large", "Unschedulable").await;
    assert_eq!(
        message,
        "0/3 nodes are available: 1 Insufficient GPU Memory in one device, 2 Insufficient aliyun.com/gpu-mem."
    );
    assert_eq!(event(&api, "large", "FailedScheduling").await, message);
    let asked = extender.requests("filter").len();
    extender.change(|stub| stub.filter = Box::new(|args| ok(json!({"NodeNames": args["NodeNames"], "Error": ""}))));
    // Without an event of the cluster, the extender is not called again about the pod.
    pod(&api, "plain", 0);
    bound(&api, "plain").await;
    assert_eq!(extender.requests("filter").len(), asked);
    delete(&api, "small");
    assert_eq!(bound(&api, "large").await["spec"]["nodeName"], "n1");
}

#[tokio::test]
async fn a_node_that_changes_wakes_pods() {
    let api = api();
    let _scheduler = Scheduler::start(api.client(), SchedulerConfig::default());
    pod(&api, "p", 4);
    assert_eq!(
        refused(&api, "p", "Unschedulable").await,
        "no nodes available to schedule pods"
    );
    node(&api, "n1", 0);
    let message = "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.";
    pod_until(&api, "p", |pod| pod["status"]["conditions"][0]["message"] == message).await;
    let grown = json!({"status": {"allocatable": {MEM: "4"}}});
    api.patch("nodes/status", "", "n1", PatchKind::Merge, &grown).unwrap();
    bound(&api, "p").await;
}

#[tokio::test]
async fn errors_of_the_extender_are_scheduler_errors_and_tried_again() {
    let api = api();
    let extender = Extender::start(&api).await;
    node(&api, "n1", 16);
    let mut config = config(&extender);
    config.http_timeout = Duration::from_millis(200);
    let _scheduler = Scheduler::start(api.client(), config);
    extender.change(|stub| stub.filter = Box::new(|_| ok(json!({"Error": "not the leader"}))));
    pod(&api, "p", 4);
    assert_eq!(refused(&api, "p", "SchedulerError").await, "not the leader");
    extender.change(|stub| stub.filter = Box::new(|_| (StatusCode::SERVICE_UNAVAILABLE, json!({"Error": "thrown away"}))));
    let url = format!("http://{}/e", extender.address);
    let code = format!("failed filter with extender at URL {url}, code 503");
    pod_until(&api, "p", |pod| pod["status"]["conditions"][0]["message"] == *code).await;
    extender.change(|stub| stub.filter = Box::new(|_| ok(json!({"NodeNames": ["n9"]}))));
    let stranger = format!("extender \"{url}\" claims a filtered node \"n9\" which is not found in the input node list");
    pod_until(&api, "p", |pod| pod["status"]["conditions"][0]["message"] == *stranger).await;
    extender.change(|stub| {
        stub.filter = Box::new(|args| ok(json!({"NodeNames": args["NodeNames"]})));
        stub.bind = Some(Box::new(|_| ok(json!({"Error": "GPU-1 is full"}))));
    });
    pod_until(&api, "p", |pod| pod["status"]["conditions"][0]["message"] == "GPU-1 is full").await;
    // A bind that takes too long counts as failed, but the scheduler notices that the pod was bound after all.
    extender.change(|stub| {
        stub.bind = None;
        stub.bind_delay = Duration::from_millis(400);
    });
    bound(&api, "p").await;
}

#[tokio::test]
async fn a_pod_on_its_way_counts_and_a_failed_bind_is_forgotten() {
    let api = api();
    let extender = Extender::start(&api).await;
    node(&api, "n1", 16);
    extender.change(|stub| stub.bind_delay = Duration::from_millis(300));
    let _scheduler = Scheduler::start(api.client(), config(&extender));
    pod(&api, "first", 10);
    let bind_sent = async {
        while extender.requests("bind").is_empty() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, bind_sent).await.unwrap();
    // The pod is not bound yet, but its units are already taken.
    assert!(api.get("pods", "default", "first").unwrap()["spec"]["nodeName"].is_null());
    pod(&api, "second", 10);
    let message = refused(&api, "second", "Unschedulable").await;
    assert_eq!(message, "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.");
    bound(&api, "first").await;
    // Refused binds return the units at once.
    extender.change(|stub| {
        stub.bind_delay = Duration::ZERO;
        stub.bind = Some(Box::new(|_| ok(json!({"Error": "no"}))));
    });
    pod(&api, "third", 6);
    refused(&api, "third", "SchedulerError").await;
    delete(&api, "third");
    extender.change(|stub| stub.bind = None);
    pod(&api, "fourth", 6);
    bound(&api, "fourth").await;
    // A pod that has ended holds nothing.
    let ended = json!({"status": {"phase": "Succeeded"}});
    api.patch("pods/status", "default", "first", PatchKind::Merge, &ended)
        .unwrap();
    bound(&api, "second").await;
}

#[tokio::test]
async fn prioritize_decides_between_nodes_and_is_skipped_for_one() {
    let api = api();
    let extender = Extender::start(&api).await;
    for name in ["n1", "n2", "n3"] {
        node(&api, name, 16);
    }
    extender.change(|stub| stub.prioritize = Box::new(|_| ok(json!([{"Host": "n1", "Score": 1}, {"Host": "n2", "Score": 9}]))));
    let mut config = config(&extender);
    config.prioritize_verb = Some("prioritize".to_owned());
    let _scheduler = Scheduler::start(api.client(), config);
    pod(&api, "p", 4);
    assert_eq!(bound(&api, "p").await["spec"]["nodeName"], "n2");
    let asked = extender.requests("prioritize").len();
    extender.change(|stub| stub.filter = Box::new(|_| ok(json!({"NodeNames": ["n3"]}))));
    pod(&api, "q", 4);
    assert_eq!(bound(&api, "q").await["spec"]["nodeName"], "n3");
    assert_eq!(extender.requests("prioritize").len(), asked);
}

/// On a real cluster, no pod was bound during the first half minute after the API server was back.
#[tokio::test]
async fn a_watch_that_fails_is_tried_again_less_and_less_often() {
    let api = api();
    node(&api, "n1", 16);
    let extender = Extender::start(&api).await;
    let _scheduler = Scheduler::start(api.client(), config(&extender));
    pod(&api, "before", 1);
    bound(&api, "before").await;
    let refuse = Effect::Refuse(503);
    let rule = api
        .faults()
        .add(Rule::new(Match::any().verb("list").verb("watch").resource("pods"), refuse));
    api.faults().cut_watches();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    // The waits are 80, 160, 320, and 640 ms; at a constant 80 ms there would be 18 tries.
    let tries = api.faults().fired(rule);
    assert!((3..=6).contains(&tries), "{tries} tries");
    api.faults().remove(rule);
    pod(&api, "after", 1);
    bound(&api, "after").await;
}

#[tokio::test]
async fn an_extender_that_is_not_there_is_an_error_and_not_the_end() {
    let api = api();
    node(&api, "n1", 16);
    let free = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .unwrap()
        .local_addr()
        .unwrap();
    let config = SchedulerConfig {
        extender_url: Some(format!("http://{free}/e")),
        ..SchedulerConfig::default()
    };
    let scheduler = Scheduler::start(api.client(), config);
    pod(&api, "gpu", 4);
    let message = refused(&api, "gpu", "SchedulerError").await;
    assert!(
        message.starts_with(&format!("Post \"http://{free}/e/filter\": ")),
        "{message}"
    );
    pod(&api, "plain", 0);
    bound(&api, "plain").await;
    let metrics = tokio::runtime::Handle::current().metrics();
    scheduler.shutdown().await;
    drop(api);
    let all_ended = async {
        while metrics.num_alive_tasks() > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(LIMIT, all_ended).await.expect("a task is left");
}

/// Create a pod that may evict others.
fn urgent(api: &ApiServer, name: &str, units: u64) {
    let pod = json!({"metadata": {"name": name}, "spec": {"priorityClassName": "system-cluster-critical",
        "containers": [{"name": "a", "image": "t:1", "resources": {"limits": {MEM: units.to_string()}}}]}});
    api.create("pods", pod).unwrap();
}

fn deleted(api: &ApiServer, name: &str) -> bool {
    api.get("pods", "default", name)
        .map_or(true, |pod| pod["metadata"]["deletionTimestamp"].is_string())
}

#[tokio::test]
async fn a_pod_of_higher_priority_evicts_whom_the_extender_says_of_those_that_the_sums_name() {
    let api = api();
    let extender = Extender::start(&api).await;
    node(&api, "n1", 16);
    node(&api, "n2", 16);
    let config = SchedulerConfig {
        preempt_verb: Some("preempt".to_owned()),
        ..config(&extender)
    };
    let _scheduler = Scheduler::start(api.client(), config);
    let mut nodes = std::collections::BTreeMap::new();
    for name in ["a", "b", "c", "d"] {
        pod(&api, name, 8);
        let bound = bound(&api, name).await;
        nodes.insert(name, bound["spec"]["nodeName"].as_str().unwrap().to_owned());
    }
    // Of two candidates only n2 remains. It loses both of its pods, although the sums require only one.
    let on_n2: Vec<&str> = nodes
        .iter()
        .filter(|(_, node)| *node == "n2")
        .map(|(name, _)| *name)
        .collect();
    let uids: Vec<Value> = on_n2
        .iter()
        .map(|name| json!({"UID": api.get("pods", "default", name).unwrap()["metadata"]["uid"]}))
        .collect();
    extender.change(|stub| {
        stub.preempt = Box::new(move |_| ok(json!({"NodeNameToMetaVictims": {"n2": {"Pods": uids, "NumPDBViolations": 0}}})));
    });
    urgent(&api, "urgent", 6);
    let nominated = pod_until(&api, "urgent", |pod| pod["status"]["nominatedNodeName"].is_string()).await;
    assert_eq!(nominated["status"]["nominatedNodeName"], "n2");
    let asked = &extender.requests("preempt")[0];
    let proposed = asked["NodeNameToMetaVictims"].as_object().unwrap();
    assert_eq!(proposed.len(), 2, "{asked}");
    assert!(
        proposed
            .values()
            .all(|victims| victims["Pods"].as_array().unwrap().len() == 1),
        "{asked}"
    );
    for name in &on_n2 {
        let uid = nominated["metadata"]["uid"].as_str().unwrap();
        assert_eq!(
            event(&api, name, "Preempted").await,
            format!("Preempted by pod {uid} on node n2")
        );
    }
    for name in on_n2 {
        pod_until(&api, name, |pod| pod["metadata"]["deletionTimestamp"].is_string()).await;
        delete(&api, name);
    }
    assert_eq!(bound(&api, "urgent").await["spec"]["nodeName"], "n2");
    assert!(
        nodes
            .iter()
            .filter(|(_, node)| *node == "n1")
            .all(|(name, _)| !deleted(&api, name))
    );
}

#[tokio::test]
async fn nobody_is_evicted_when_the_extender_leaves_no_node_or_fails_or_when_the_sum_is_enough() {
    let api = api();
    let extender = Extender::start(&api).await;
    node(&api, "n1", 16);
    let config = SchedulerConfig {
        preempt_verb: Some("preempt".to_owned()),
        ..config(&extender)
    };
    let _scheduler = Scheduler::start(api.client(), config);
    pod(&api, "a", 12);
    bound(&api, "a").await;
    extender.change(|stub| stub.preempt = Box::new(|_| ok(json!({"NodeNameToMetaVictims": {}}))));
    urgent(&api, "left-out", 6);
    refused(&api, "left-out", "Unschedulable").await;
    extender.change(|stub| stub.preempt = Box::new(|_| (StatusCode::SERVICE_UNAVAILABLE, json!({}))));
    urgent(&api, "fails", 6);
    refused(&api, "fails", "Unschedulable").await;
    let before = extender.requests("preempt").len();
    assert_eq!(before, 2);
    extender.change(|stub| {
        stub.filter =
            Box::new(|args| ok(json!({"NodeNames": [], "FailedNodes": {"n1": "no single GPU"}, "Error": args["Error"]})));
    });
    urgent(&api, "sum-is-enough", 4);
    refused(&api, "sum-is-enough", "Unschedulable").await;
    assert_eq!(extender.requests("preempt").len(), before, "the extender is not called");
    assert!(!deleted(&api, "a"));
}
