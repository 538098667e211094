//! The extender, called as kube-scheduler calls it. It knows a cluster of nodes with inventories and pods with rules. Its API
//! server is part of the input: the objects that it lists, and its response to a Binding.

use std::cell::OnceCell;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use axum::body::Body;
use axum::http::{Method, Request, Response, StatusCode};
use bytes::Bytes;
use divvy_extender::{ExtenderSettings, Served, serve};
use divvy_model::{Allocation, Health, Inventory, MemoryUnit, names};
use http_body_util::BodyExt as _;
use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};
use tokio::runtime::Runtime;
use tokio_util::sync::{CancellationToken, DropGuard};
use tower::ServiceExt as _;

use super::{CostLimits, FuzzTarget};

/// In a debug build, a call over 40 nodes with 8 GPUs takes 20 to 60 ms and holds 1.1 MiB. A bind with a separate extender takes as long.
const CALL: CostLimits = CostLimits {
    time: Duration::from_millis(250),
    time_per_byte: Duration::from_micros(6),
    bytes: 8 << 20,
    bytes_per_byte: 60,
};

pub(crate) fn targets() -> Vec<FuzzTarget> {
    let asked = |name, verb, accepted: &[Value], refused: &[Value]| {
        let asked = VerbTarget::new(verb);
        seeded(FuzzTarget::new(name, move |bytes| asked.read(bytes), &[]), accepted, refused)
    };
    vec![
        asked("kube-scheduler's filter", Verb::Filter, &fitting(), &unfitting()),
        asked("kube-scheduler's prioritize", Verb::Prioritize, &fitting(), &unfitting()[..1]),
        asked("kube-scheduler's preempt", Verb::Preempt, &preempting(), &not_preempting()),
        seeded(FuzzTarget::new("kube-scheduler's bind", bind, &[]), &bound(), &not_bound()),
        seeded(
            FuzzTarget::new("the cluster that the extender lists", listed, &[]),
            &clusters(),
            &[],
        ),
    ]
}

fn seeded(target: FuzzTarget, accepted: &[Value], refused: &[Value]) -> FuzzTarget {
    let bytes = |seeds: &[Value]| seeds.iter().map(|seed| seed.to_string().into_bytes()).collect();
    FuzzTarget {
        accepted: bytes(accepted),
        refused: bytes(refused),
        limits: CALL,
        ..target
    }
}

// The contents of the cluster.

fn gpu(node: &str, index: u32, model: &str, total: u64) -> Value {
    json!({"index": index, "uuid": format!("GPU-{node}-{index}"), "minor": index, "model": model, "totalMiB": total, "units": total / 1024,
        "cc": "8.0", "sms": 108, "clockMHz": 1410, "numa": index / 4, "health": "ok"})
}

fn node(name: &str, gpus: &[Value]) -> Value {
    let units: u64 = gpus.iter().filter_map(|gpu| gpu["units"].as_u64()).sum();
    let amounts = json!({"aliyun.com/gpu-mem": units.to_string(), "aliyun.com/gpu-count": gpus.len().to_string(), "cpu": "64", "memory": "512Gi",
        "pods": "110"});
    let inventory = json!({"v": 1, "agent": "0.1.0", "driver": "550.54.15", "unitMiB": 1024, "gpus": gpus});
    json!({"metadata": {"name": name, "uid": format!("uid-{name}"), "labels": {"zone": "a"},
            "annotations": {names::INVENTORY: inventory.to_string()}},
        "spec": {}, "status": {"capacity": amounts, "allocatable": amounts,
            "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}], "nodeInfo": {"containerRuntimeVersion": "containerd://2.1.4"}}})
}

/// Return a node with eight GPUs, each linked to all others: two groups connected by NVLink.
fn linked(name: &str, model: &str, total: u64) -> Value {
    let mut gpus: Vec<Value> = (0..8).map(|index| gpu(name, index, model, total)).collect();
    for (from, gpu) in (0..8).zip(&mut gpus) {
        let links = (0..8).filter(|to| *to != from).map(|to| {
            let (kind, count) = if to / 4 == from / 4 { ("nvlink", 12) } else { ("system", 0) };
            json!([format!("GPU-{name}-{to}"), kind, count])
        });
        gpu["links"] = links.collect();
    }
    node(name, &gpus)
}

/// Return a node with MIG instances and a whole GPU.
fn split(name: &str) -> Value {
    let instances = (0..7).map(|index| {
        let mut instance = gpu(name, index, "NVIDIA A100-SXM4-40GB MIG 1g.5gb", 4864);
        instance["kind"] = json!("mig");
        instance["parent"] = json!("GPU-parent");
        instance
    });
    let whole = gpu(name, 7, "NVIDIA A100-SXM4-40GB", 40_960);
    node(name, &instances.chain([whole]).collect::<Vec<_>>())
}

/// Return a node with a failed GPU, a lost one, its successor with the same index, and one whose memory is held by containers of a pod that is
/// gone.
fn unwell(name: &str) -> Value {
    let mut gpus = [
        gpu(name, 0, "Tesla T4", 15_360),
        gpu(name, 1, "Tesla T4", 15_360),
        gpu(name, 2, "Tesla T4", 15_360),
        gpu(name, 3, "Tesla T4", 15_360),
        gpu(name, 3, "Tesla T4", 15_360),
    ];
    gpus[1]["health"] = json!("failed");
    gpus[1]["reason"] = json!("XID 79");
    gpus[3]["health"] = json!("lost");
    gpus[4]["uuid"] = json!(format!("GPU-{name}-new"));
    gpus[2]["heldMiB"] = json!(4096);
    node(name, &gpus)
}

/// Return forty nodes, enough to make a text noticeable that is repeated once per node.
fn nodes() -> Vec<Value> {
    let mut nodes = vec![linked("a1", "NVIDIA A100-SXM4-80GB", 81_920), split("m1"), unwell("t1")];
    // Nodes that have only gpushare's capacities, that are not shared, that must not be used, and that are unreadable.
    let mut plain = node("g1", &[gpu("g1", 0, "", 16_384), gpu("g1", 1, "", 16_384)]);
    plain["metadata"]["annotations"] = json!({});
    let mut closed = linked("c1", "NVIDIA H100 80GB HBM3", 81_920);
    let inventory = closed["metadata"]["annotations"][names::INVENTORY]
        .as_str()
        .unwrap_or_default();
    closed["metadata"]["annotations"][names::INVENTORY] =
        json!(inventory.replacen("{\"v\":1,", "{\"v\":1,\"unschedulable\":true,", 1));
    let mut unreadable = linked("u1", "NVIDIA H100 80GB HBM3", 81_920);
    unreadable["metadata"]["annotations"][names::INVENTORY] = json!("{\"v\":2}");
    nodes.extend([
        plain,
        json!({"metadata": {"name": "x1", "uid": "uid-x1"}, "spec": {}}),
        closed,
        unreadable,
    ]);
    nodes.extend((nodes.len()..40).map(|number| linked(&format!("h{number}"), "NVIDIA H100 80GB HBM3", 81_920)));
    nodes
}

fn pod(name: &str, units: u64, annotations: &Value) -> Value {
    json!({"metadata": {"name": name, "namespace": "default", "uid": format!("uid-{name}"), "annotations": annotations},
        "spec": {"priority": 0, "schedulerName": "divvy-scheduler",
            "containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": units.to_string(), "cpu": "2", "memory": "4Gi"}}}]},
        "status": {"phase": "Pending"}})
}

fn allocation(gpus: &[&str], mib: u64) -> String {
    let share = |uuid: &&str| json!({"uuid": uuid, "memMiB": mib});
    let shares: Vec<Value> = gpus.iter().map(share).collect();
    json!({"v": 1, "gpus": shares, "containers": {"c": shares}}).to_string()
}

fn running(name: &str, node: &str, units: u64, annotations: &Value) -> Value {
    let mut pod = pod(name, units, annotations);
    pod["spec"]["nodeName"] = json!(node);
    pod["status"] = json!({"phase": "Running",
        "containerStatuses": [{"name": "c", "state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}]});
    pod
}

/// Return the pods. On a1, GPU 0 is full and GPU 1 half full; one pod is nominated to a1, and others wait with rules.
fn pods() -> Vec<Value> {
    let mut nominated = pod("nominated", 40, &json!({names::GPU_MODEL: "A100*"}));
    nominated["spec"]["priority"] = json!(1000);
    nominated["status"]["nominatedNodeName"] = json!("a1");
    let mut leaving = running(
        "leaving",
        "t1",
        15,
        &json!({names::ALLOCATION: allocation(&["GPU-t1-0"], 15_360)}),
    );
    leaving["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z");
    vec![
        running(
            "full",
            "a1",
            80,
            &json!({names::ALLOCATION: allocation(&["GPU-a1-0"], 81_920)}),
        ),
        running(
            "half",
            "a1",
            40,
            &json!({names::ALLOCATION: allocation(&["GPU-a1-1"], 40_960)}),
        ),
        running(
            "two",
            "a1",
            80,
            &json!({names::GPUS: "2", names::ALLOCATION: allocation(&["GPU-a1-2", "GPU-a1-3"], 40_960)}),
        ),
        running(
            "old",
            "g1",
            4,
            &json!({"ALIYUN_COM_GPU_MEM_IDX": "0", "ALIYUN_COM_GPU_MEM_POD": "4", "ALIYUN_COM_GPU_MEM_DEV": "16"}),
        ),
        running("forged", "m1", 4, &json!({names::ALLOCATION: "{"})),
        leaving,
        nominated,
        pod(
            "waiting",
            8,
            &json!({names::GPU_MODEL: "!T4", names::GPU_MEMORY: ">=40Gi", names::GPU_PREFER: "fastest"}),
        ),
    ]
}

// The requests.

fn rules() -> Value {
    json!({names::GPU_MODEL: "A100*,H100*,!T4", names::GPU_MEMORY: ">=40Gi", names::GPU_PREFER: "most-memory"})
}

fn names_of(nodes: &[Value]) -> Vec<&str> {
    nodes.iter().filter_map(|node| node["metadata"]["name"].as_str()).collect()
}

/// Return as many patterns as a pod may have, with almost as many bytes, which match no product.
fn long_rule(sign: &str) -> Value {
    let patterns = vec![format!("{sign}NVIDIA A100-SXM4-80GB-custom"); 32];
    json!({names::GPU_MODEL: patterns.join(",")})
}

/// Return requests for which some node has room.
fn fitting() -> Vec<Value> {
    let (nodes, no_rule) = (nodes(), json!({}));
    let all = names_of(&nodes);
    let named = json!({names::GPU_UUID: "GPU-a1-4,GPU-a1-5", names::GPUS: "2"});
    let of_mig = json!({names::GPU_MODEL: "*1g.5gb"});
    vec![
        json!({"Pod": pod("p", 4, &no_rule), "NodeNames": all}),
        json!({"Pod": pod("p", 8, &rules()), "NodeNames": all}),
        json!({"Pod": pod("p", 8, &named), "NodeNames": ["a1", "m1", "t1"]}),
        json!({"Pod": pod("p", 4, &of_mig), "NodeNames": ["m1", "g1", "nobody"]}),
        json!({"Pod": pod("p", 4, &long_rule("!")), "NodeNames": all}),
        // As with nodeCacheCapable: false.
        json!({"Pod": pod("p", 8, &rules()), "Nodes": {"metadata": {}, "items": &nodes[..4]}, "NodeNames": null}),
    ]
}

/// Return requests that are invalid or for which no node has room.
fn unfitting() -> Vec<Value> {
    let nodes = nodes();
    let unreadable = json!({names::GPU_PREFER: "large"});
    vec![
        json!({"Pod": pod("p", 8, &json!({})), "Nodes": null}),
        json!({"Pod": pod("p", 8, &unreadable), "NodeNames": ["a1"]}),
        json!({"Pod": pod("p", 80, &json!({names::GPU_MODEL: "A100*"})), "NodeNames": ["t1", "m1", "g1", "x1", "c1", "u1", "nobody"]}),
        json!({"Pod": pod("p", 64, &json!({names::GPUS: "16"})), "NodeNames": ["a1", "g1"]}),
        json!({"Pod": pod("p", 8, &long_rule("")), "NodeNames": names_of(&nodes)}),
    ]
}

fn preemptor(units: u64) -> Value {
    let mut pod = pod("p", units, &json!({names::GPU_MODEL: "A100*"}));
    pod["spec"]["priority"] = json!(1000);
    pod
}

fn preempting() -> Vec<Value> {
    vec![
        json!({"Pod": preemptor(80), "NodeNameToMetaVictims": {"a1": {"Pods": [{"UID": "uid-half"}], "NumPDBViolations": 1},
            "t1": {"Pods": [{"UID": "uid-leaving"}]}}}),
        json!({"Pod": preemptor(72), "NodeNameToVictims": {"a1": {"Pods": [pods()[0], pods()[2]], "NumPDBViolations": 0}}}),
    ]
}

fn not_preempting() -> Vec<Value> {
    vec![
        json!({"Pod": preemptor(80), "NodeNameToMetaVictims": {"t1": {"Pods": [{"UID": "uid-leaving"}]}}}),
        json!({"Pod": preemptor(80)}),
    ]
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verb {
    Filter,
    Prioritize,
    Preempt,
}

/// A verb of an extender that knows [`nodes`] and [`pods`]. The verb does not change the extender's state, so one extender reads all inputs.
struct VerbTarget {
    verb: Verb,
    // Each extender belongs to the thread that calls it.
    extender: OnceCell<ServedExtender>,
}

impl VerbTarget {
    fn new(verb: Verb) -> VerbTarget {
        VerbTarget {
            verb,
            extender: OnceCell::new(),
        }
    }

    fn read(&self, bytes: &[u8]) -> bool {
        if serde_json::from_slice::<Value>(bytes).is_ok_and(|ask| names_many(&ask)) {
            return false;
        }
        let extender = self.extender.get_or_init(|| {
            let extender = ServedExtender::start(FuzzCluster {
                nodes: nodes(),
                pods: pods(),
                ..FuzzCluster::default()
            });
            extender.expect("it lists its cluster")
        });
        let path = match self.verb {
            Verb::Filter => "/gpushare-scheduler/filter",
            Verb::Prioritize => "/gpushare-scheduler/prioritize",
            Verb::Preempt => "/gpushare-scheduler/preempt",
        };
        let answer = extender.ask(path, bytes);
        match self.verb {
            Verb::Filter => filtered(&answer, bytes.len()),
            Verb::Prioritize => scored(&answer, bytes.len()),
            Verb::Preempt => evicted(&answer, bytes.len()),
        }
    }
}

/// The greatest number of nodes in a call with a time limit. The time of a call necessarily grows with their number.
const MOST_NODES: usize = 100;

/// Report whether a request names too many nodes for a time limit. kube-scheduler names each node once.
fn names_many(ask: &Value) -> bool {
    let count = |field: &Value| match field {
        Value::Array(list) => list.len(),
        Value::Object(fields) => fields.len().max(field["items"].as_array().map_or(0, Vec::len)),
        _ => 0,
    };
    let fields = ask.as_object().into_iter().flat_map(serde_json::Map::values);
    fields.map(count).any(|nodes| nodes > MOST_NODES)
}

/// Rule: the text for each node does not repeat the pod's text, so the size of a response grows with the request and with the
/// number of nodes, but not with their product.
fn in_proportion(answer: &ExtenderAnswer, asked: usize, nodes: usize) {
    let most = (4 << 10) + 6 * asked + 700 * nodes;
    assert!(
        answer.length <= most,
        "the answer to {asked} bytes about {nodes} nodes has {} bytes; at most {most} are allowed",
        answer.length
    );
}

/// Rule: each node either passes or fails. Accepted: some node passes.
fn filtered(answer: &ExtenderAnswer, asked: usize) -> bool {
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    if answer.body.is_null() {
        in_proportion(answer, asked, 0);
        return false;
    }
    let list = |key: &str| answer.body[key].as_array().cloned().unwrap_or_default();
    let passed: BTreeSet<String> = list("NodeNames")
        .iter()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    let failed = answer.body["FailedNodes"].as_object().cloned().unwrap_or_default();
    assert!(!passed.iter().any(|name| failed.contains_key(name)), "{}", answer.body);
    assert!(failed.values().all(|why| why.as_str().is_some_and(|why| !why.is_empty())));
    in_proportion(answer, asked, passed.len() + failed.len());
    let error = answer.body["Error"].as_str().expect("a text");
    assert!(error.is_empty() || passed.is_empty() && failed.is_empty(), "{}", answer.body);
    !passed.is_empty()
}

/// Rule: every node has a score that kube-scheduler accepts. Accepted: the scores differ, or there is one node.
fn scored(answer: &ExtenderAnswer, asked: usize) -> bool {
    let Some(pairs) = answer.body.as_array() else {
        assert!(answer.is_refusal(), "{}", answer.body);
        return false;
    };
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    in_proportion(answer, asked, pairs.len());
    // The limit is MaxExtenderPriority in kube-scheduler's extender/v1.
    let scores: Vec<u64> = pairs.iter().map(|pair| pair["Score"].as_u64().expect("a number")).collect();
    assert!(scores.iter().all(|score| *score <= 10), "{scores:?}");
    !scores.is_empty()
}

/// Rule: every pod that may be evicted was proposed or is known on the node. Accepted: some pod may be evicted.
fn evicted(answer: &ExtenderAnswer, asked: usize) -> bool {
    let Some(nodes) = answer.body["NodeNameToMetaVictims"].as_object() else {
        assert!(answer.is_refusal(), "{}", answer.body);
        return false;
    };
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    in_proportion(answer, asked, nodes.len());
    nodes
        .values()
        .any(|victims| victims["Pods"].as_array().is_some_and(|pods| !pods.is_empty()))
}

// The bind requests.

/// A bind, the pod in the API server, and the API server's responses.
#[derive(Debug, Deserialize)]
struct Bind {
    /// The request of kube-scheduler.
    ask: Value,
    pod: Value,
    /// Whether the extender's watch has already shown the pod.
    #[serde(default)]
    seen: bool,
    /// The responses to the POSTs of the Binding; 201 when they are used up.
    #[serde(default)]
    posts: Vec<ExtenderReply>,
    /// The responses to the GETs of the pod; the current pod when they are used up.
    #[serde(default)]
    gets: Vec<ExtenderReply>,
}

#[derive(Debug, Clone, Deserialize)]
struct ExtenderReply {
    /// The status. 0: the connection breaks. 1: there is no response.
    status: u16,
    #[serde(default)]
    body: String,
    /// Whether the API server has carried out the Binding, independent of its answer.
    #[serde(default)]
    done: bool,
}

fn status(code: u16, reason: &str, details: &Value) -> String {
    json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": format!("pods \"p\": {reason}"), "reason": reason,
        "details": details, "code": code})
    .to_string()
}

fn bind_seed(pod: &Value, seen: bool, posts: &Value, gets: &Value) -> Value {
    json!({"ask": {"PodName": "p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "a1"}, "pod": pod, "seen": seen, "posts": posts,
        "gets": gets})
}

fn bound() -> Vec<Value> {
    let plain = pod("p", 8, &json!({}));
    let spread = pod("p", 16, &json!({names::GPUS: "2", names::GPU_UUID: "GPU-a1-6,GPU-a1-7"}));
    let lost = json!([{"status": 504, "body": "<html>504 Gateway Time-out</html>", "done": true}]);
    let conflict = json!([{"status": 409, "body": status(409, "Conflict", &Value::Null), "done": true}]);
    let mut warned = pod("p", 8, &rules());
    warned["spec"]["containers"][0]["resources"]["limits"]["aliyun.com/gpu-count"] = json!("2");
    let none = json!([]);
    vec![
        bind_seed(&plain, true, &none, &none),
        bind_seed(&warned, false, &none, &none),
        bind_seed(&spread, true, &none, &none),
        bind_seed(&plain, true, &lost, &none),
        bind_seed(&plain, true, &conflict, &none),
        bind_seed(
            &plain,
            true,
            &json!([{"status": 0, "done": true}]),
            &json!([{"status": 502, "body": "{"}]),
        ),
        bind_seed(&plain, true, &json!([{"status": 1, "done": true}]), &none),
        // The pod asks for no memory, so it is bound without annotations.
        bind_seed(
            &json!({"metadata": {"name": "p", "namespace": "default", "uid": "uid-p"}, "spec": {"containers": [{"name": "c"}]}}),
            false,
            &none,
            &none,
        ),
    ]
}

fn not_bound() -> Vec<Value> {
    let plain = pod("p", 8, &json!({}));
    let details = json!({"name": "p", "kind": "pods", "uid": "uid-p"});
    let none = json!([]);
    let answered = |reply: Value| bind_seed(&plain, true, &json!([reply]), &none);
    let gone = json!({"status": 404, "body": status(404, "NotFound", &details)});
    let mut seeds = vec![
        answered(gone.clone()),
        answered(json!({"status": 404, "body": "404 page not found\n"})),
        answered(json!({"status": 409, "body": status(409, "Conflict", &details)})),
        answered(json!({"status": 403, "body": status(403, "Forbidden", &details)})),
        answered(json!({"status": 500, "body": "{\"kind\":\"Sta"})),
        answered(json!({"status": 0})),
        bind_seed(&plain, false, &none, &json!([gone])),
        bind_seed(&plain, false, &none, &json!([{"status": 200, "body": "<html>"}])),
        bind_seed(&pod("p", 8, &json!({names::GPU_MODEL: "T4"})), true, &none, &none),
        bind_seed(&pod("p", 8, &json!({names::GPU_PREFER: "large"})), true, &none, &none),
        bind_seed(&pod("other", 8, &json!({})), false, &none, &none),
    ];
    let mut without_name = bind_seed(&plain, true, &none, &none);
    without_name["ask"] = json!({"PodName": "../p", "PodNamespace": "default", "PodUID": "uid-p", "Node": "a1"});
    seeds.push(without_name);
    seeds
}

/// Return the nodes for a bind. They are fewer than for the other verbs because each input starts a separate extender: a bind
/// changes the extender's state.
fn bind_nodes() -> Vec<Value> {
    nodes().into_iter().take(4).collect()
}

/// Rules: the Binding contains what was requested, on healthy GPUs of the node, and success is reported only for a Binding that was
/// carried out. Accepted: a Binding was carried out.
fn bind(bytes: &[u8]) -> bool {
    let Ok(scene) = serde_json::from_slice::<Bind>(bytes) else {
        return false;
    };
    let ask = scene.ask.to_string();
    let mut pods = pods();
    pods.extend(scene.seen.then(|| scene.pod.clone()));
    let cluster = FuzzCluster {
        nodes: bind_nodes(),
        pods,
        pod: scene.pod,
        posts: scene.posts,
        gets: scene.gets,
    };
    // A pod of the input can make the list unreadable.
    let Some(extender) = ServedExtender::start(cluster) else {
        return false;
    };
    let answer = extender.ask("/gpushare-scheduler/bind", ask.as_bytes());
    assert_eq!(answer.status, StatusCode::OK, "{}", answer.body);
    in_proportion(&answer, bytes.len(), 1);
    let error = answer.body["Error"].as_str().expect("a text");
    let api = extender.api();
    assert!(api.posted.len() <= 1, "a bind posts at most once: {:?}", api.posted);
    for binding in &api.posted {
        let node = binding["target"]["name"].as_str().unwrap_or_default();
        for asked in [node, binding["metadata"]["uid"].as_str().unwrap_or_default()] {
            assert!(ask.contains(asked), "{asked:?} was not asked for: {ask}");
        }
        sound(&api.cluster, node, &binding["metadata"]["annotations"]);
    }
    assert!(
        !error.is_empty() || api.bound.is_some() || api.cluster.pod["spec"]["nodeName"].is_string(),
        "success, but the pod is not bound: {:?}",
        api.posted
    );
    error.is_empty() && !api.posted.is_empty()
}

/// Rules: the allocation names healthy GPUs of the node, each once, and no more memory than they have.
fn sound(cluster: &FuzzCluster, node: &str, annotations: &Value) {
    let Some(text) = annotations[names::ALLOCATION].as_str() else {
        return;
    };
    let allocation = Allocation::parse(text).expect("what is posted can be read");
    let found = cluster
        .nodes
        .iter()
        .find(|other| other["metadata"]["name"] == node)
        .expect("a node");
    let inventory = found["metadata"]["annotations"][names::INVENTORY]
        .as_str()
        .unwrap_or_default();
    let inventory = Inventory::parse(inventory).expect("an inventory");
    assert!(!allocation.gpus.is_empty());
    for share in &allocation.gpus {
        let gpu = inventory
            .gpus
            .iter()
            .find(|gpu| gpu.uuid == share.uuid)
            .expect("a GPU of the node");
        assert!(gpu.health == Health::Ok && share.memory <= gpu.total, "{share:?} on {gpu:?}");
        assert_eq!(allocation.gpus.iter().filter(|other| other.uuid == share.uuid).count(), 1);
    }
}

// The cluster as an input.

/// The objects that the API server lists, and the requests that follow.
#[derive(Debug, Deserialize)]
struct ListedObjects {
    nodes: Vec<Value>,
    pods: Vec<Value>,
    ask: Value,
}

fn clusters() -> Vec<Value> {
    let (nodes, pods) = (nodes(), pods());
    let ask = |rules: &Value| json!({"Pod": pod("p", 8, rules), "NodeNames": names_of(&nodes)});
    vec![
        json!({"nodes": &nodes[..5], "pods": pods, "ask": ask(&rules())}),
        json!({"nodes": &nodes[1..3], "pods": [], "ask": ask(&json!({names::GPU_MODEL: "Tesla*"}))}),
    ]
}

/// Rules: whatever nodes and pods are listed, the extender answers every verb, and its answers grow only in proportion to the
/// list. Accepted: some node has room.
fn listed(bytes: &[u8]) -> bool {
    let Ok(scene) = serde_json::from_slice::<ListedObjects>(bytes) else {
        return false;
    };
    if names_many(&scene.ask) || scene.nodes.len() + scene.pods.len() > MOST_NODES {
        return false;
    }
    let ask = scene.ask.to_string();
    let cluster = FuzzCluster {
        nodes: scene.nodes,
        pods: scene.pods,
        ..FuzzCluster::default()
    };
    let Some(extender) = ServedExtender::start(cluster) else {
        return false;
    };
    let accepted = filtered(&extender.ask("/gpushare-scheduler/filter", ask.as_bytes()), bytes.len());
    scored(&extender.ask("/gpushare-scheduler/prioritize", ask.as_bytes()), bytes.len());
    let report = extender.get("/gpushare-scheduler/inspect");
    assert_eq!(report.status, StatusCode::OK, "{}", report.body);
    in_proportion(&report, bytes.len(), 0);
    accepted
}

// The extender and its API server.

#[derive(Debug, Default)]
struct FuzzCluster {
    nodes: Vec<Value>,
    pods: Vec<Value>,
    /// The result of a GET of a pod.
    pod: Value,
    posts: Vec<ExtenderReply>,
    gets: Vec<ExtenderReply>,
}

/// An API server of plain values. It checks nothing, so the extender also sees objects that a real one would not store.
#[derive(Debug, Default)]
struct FuzzApi {
    cluster: FuzzCluster,
    /// The Bindings that were posted.
    posted: Vec<Value>,
    /// The Binding that was carried out.
    bound: Option<Value>,
}

struct ServedExtender {
    runtime: Runtime,
    served: Served,
    api: Arc<Mutex<FuzzApi>>,
    _stop: DropGuard,
}

/// The extender's response.
#[derive(Debug)]
struct ExtenderAnswer {
    status: StatusCode,
    length: usize,
    body: Value,
}

impl ExtenderAnswer {
    fn is_refusal(&self) -> bool {
        let status = matches!(self.status, StatusCode::BAD_REQUEST | StatusCode::SERVICE_UNAVAILABLE);
        status && self.body["error"].as_str().is_some_and(|error| !error.is_empty())
    }
}

/// The number of rounds within which the extender must have listed its cluster. Each round is one virtual second. The extender
/// retries a failed list after 0.8 s.
const ROUNDS: usize = 5;

impl ServedExtender {
    /// Start an extender. Return `None` if it cannot read what its API server lists.
    fn start(cluster: FuzzCluster) -> Option<ServedExtender> {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        // Virtual time passes when nothing else can happen, so a second for which the extender waits costs nothing.
        let runtime = runtime.enable_all().start_paused(true).build().expect("a runtime");
        let api = Arc::new(Mutex::new(FuzzApi {
            cluster,
            ..FuzzApi::default()
        }));
        let entered = runtime.enter();
        let answering = api.clone();
        let service = tower::service_fn(move |request| answer(answering.clone(), request));
        let stop = CancellationToken::new();
        let settings = ExtenderSettings::new(MemoryUnit::GIB);
        let served = serve(kube::Client::new(service, "default"), settings, stop.clone());
        drop(entered);
        let extender = ServedExtender {
            runtime,
            served,
            api,
            _stop: stop.drop_guard(),
        };
        for _ in 0..ROUNDS {
            extender
                .runtime
                .block_on(async { tokio::time::sleep(Duration::from_secs(1)).await });
            if extender.call(Method::GET, "/readyz", b"").0 == StatusCode::OK {
                return Some(extender);
            }
        }
        None
    }

    fn api(&self) -> MutexGuard<'_, FuzzApi> {
        self.api.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, path: &str, body: &[u8]) -> ExtenderAnswer {
        ExtenderAnswer::new(self.call(Method::POST, path, body))
    }

    fn get(&self, path: &str) -> ExtenderAnswer {
        ExtenderAnswer::new(self.call(Method::GET, path, b""))
    }

    fn call(&self, method: Method, path: &str, body: &[u8]) -> (StatusCode, Bytes) {
        let request = Request::builder().method(method).uri(path).body(Body::from(body.to_vec()));
        let router = self.served.router.clone();
        self.runtime.block_on(async {
            let response = router
                .oneshot(request.expect("a request"))
                .await
                .expect("a router cannot fail");
            let status = response.status();
            let body = response.into_body().collect().await.expect("a body");
            (status, body.to_bytes())
        })
    }
}

impl ExtenderAnswer {
    /// Check that the response is JSON, and read it.
    fn new((status, bytes): (StatusCode, Bytes)) -> ExtenderAnswer {
        let read = serde_json::from_slice::<Value>(&bytes);
        let body = read.unwrap_or_else(|error| {
            // Nodes are returned as they came. Their texts may contain half a surrogate pair, which is valid JSON and which Go's decoder replaces.
            let valid = serde_json::from_slice::<&RawValue>(&bytes).is_ok();
            assert!(
                valid,
                "{status} {error}: {}",
                String::from_utf8_lossy(&bytes[..bytes.len().min(300)])
            );
            Value::Null
        });
        ExtenderAnswer {
            status,
            length: bytes.len(),
            body,
        }
    }
}

/// Return the API server's response.
async fn answer<B>(api: Arc<Mutex<FuzzApi>>, request: Request<B>) -> io::Result<Response<Body>>
where
    B: axum::body::HttpBody<Data = Bytes>,
    B::Error: std::fmt::Debug,
{
    let (parts, body) = request.into_parts();
    let body = body
        .collect()
        .await
        .map_err(|error| io::Error::other(format!("{error:?}")))?
        .to_bytes();
    let path = parts.uri.path().to_owned();
    let is_watch = parts.uri.query().is_some_and(|query| query.contains("watch=true"));
    let reply = {
        let mut api = api.lock().unwrap_or_else(PoisonError::into_inner);
        match (parts.method, path.as_str()) {
            (Method::GET, _) if is_watch => {
                let nothing = futures::stream::pending::<Result<Bytes, Infallible>>();
                return Ok(Response::new(Body::from_stream(nothing)));
            }
            (Method::GET, "/api/v1/pods") => list("PodList", &api.cluster.pods),
            (Method::GET, "/api/v1/nodes") => list("NodeList", &api.cluster.nodes),
            (Method::GET, path) if path.ends_with("/configmaps") => list("ConfigMapList", &[]),
            (Method::GET, _) => api.pod(),
            (Method::POST, path) if path.ends_with("/binding") => api.binding(&body),
            // A posted event.
            _ => ExtenderReply {
                status: 201,
                body: String::from_utf8_lossy(&body).into_owned(),
                done: true,
            },
        }
    };
    match reply.status {
        0 => Err(io::Error::new(io::ErrorKind::ConnectionReset, "the connection was reset")),
        1 => std::future::pending().await,
        status => {
            // An invalid status code stands for a broken proxy.
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::BAD_GATEWAY);
            let mut response = Response::new(Body::from(reply.body));
            *response.status_mut() = status;
            Ok(response)
        }
    }
}

fn list(kind: &str, items: &[Value]) -> ExtenderReply {
    let list = json!({"kind": kind, "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items});
    ExtenderReply {
        status: 200,
        body: list.to_string(),
        done: true,
    }
}

impl FuzzApi {
    /// Return the current pod, which is bound and has the Binding's annotations once the Binding was carried out.
    fn pod(&mut self) -> ExtenderReply {
        if !self.cluster.gets.is_empty() {
            return self.cluster.gets.remove(0);
        }
        let mut pod = self.cluster.pod.clone();
        if let (Some(binding), Value::Object(fields)) = (&self.bound, &mut pod) {
            let spec = fields.entry("spec").or_insert_with(|| json!({}));
            if let Value::Object(spec) = spec {
                spec.insert("nodeName".to_owned(), binding["target"]["name"].clone());
            }
            let metadata = fields.entry("metadata").or_insert_with(|| json!({}));
            if let (Value::Object(metadata), Value::Object(added)) = (metadata, &binding["metadata"]["annotations"]) {
                let annotations = metadata.entry("annotations").or_insert_with(|| json!({}));
                if let Value::Object(annotations) = annotations {
                    annotations.extend(added.clone());
                }
            }
        }
        ExtenderReply {
            status: 200,
            body: pod.to_string(),
            done: true,
        }
    }

    fn binding(&mut self, body: &[u8]) -> ExtenderReply {
        let binding: Value = serde_json::from_slice(body).expect("a Binding is JSON");
        let reply = if self.cluster.posts.is_empty() {
            ExtenderReply {
                status: 201,
                body: json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "code": 201}).to_string(),
                done: true,
            }
        } else {
            self.cluster.posts.remove(0)
        };
        self.posted.push(binding.clone());
        if reply.done || (200..300).contains(&reply.status) {
            self.bound = Some(binding);
        }
        reply
    }
}
