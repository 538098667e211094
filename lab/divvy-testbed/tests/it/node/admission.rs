//! Registration, the calls during admission, and rejections.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use divvy_testbed::node::{AdmissionOrder, Node, NodeEvent, NodeSpec};
use prost::Message as _;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tonic::Status;

use super::plugin::{Call, TestPlugin, healthy, ids};
use super::{Bed, RESOURCE, container, eventually, plain};

fn set(ids: &[String]) -> BTreeSet<String> {
    ids.iter().cloned().collect()
}

#[tokio::test]
async fn a_registration_is_checked_and_dialled_back() {
    let bed = Bed::new().await;
    let plugin = TestPlugin::serving(&bed.node, "test.sock", 2);
    for (version, resource, endpoint, text) in [
        (
            "v1beta2",
            RESOURCE,
            "test.sock",
            "requested API version \"v1beta2\" is not supported by kubelet. Supported version is [\"v1beta1\"]",
        ),
        ("v1beta1", "unit", "test.sock", "the ResourceName \"unit\" is invalid"),
        (
            "v1beta1",
            "x.kubernetes.io/unit",
            "test.sock",
            "the ResourceName \"x.kubernetes.io/unit\" is invalid",
        ),
        ("v1beta1", RESOURCE, "absent.sock", "failed to dial device plugin:"),
    ] {
        let error = plugin.register_as(version, resource, endpoint).await.unwrap_err();
        assert!(error.message().starts_with(text), "{error}");
    }
    plugin.change(|state| state.options_error = Some(Status::internal("not yet")));
    let error = plugin.register().await.unwrap_err();
    assert_eq!(
        error.message(),
        "failed to get device plugin options: rpc error: code = Internal desc = not yet"
    );
    // The kubelet keeps nothing of the failed registrations, and a new one works.
    plugin.register().await.unwrap();
    bed.resource_is(2, 2).await;
    assert_eq!(plugin.count(|call| *call == Call::ListAndWatch), 1);
}

#[tokio::test]
async fn calls_come_per_container_in_order_and_what_the_plugin_prefers_is_given() {
    let (bed, plugin) = Bed::with_plugin(8).await;
    plugin.change(|state| state.preferred = vec![ids(2), ids(8)]);
    let uid = bed.create("p", json!({"containers": [container("a", 2), container("b", 3)]}));
    bed.ready("p").await;
    let calls = plugin.take_calls();
    let kinds: Vec<&str> = calls
        .iter()
        .map(|call| match call {
            Call::Preferred { .. } => "preferred",
            Call::Allocate(_) => "allocate",
            Call::PreStart(_) => "prestart",
            _ => "other",
        })
        .collect();
    assert_eq!(
        kinds,
        ["preferred", "allocate", "preferred", "allocate", "prestart", "prestart"]
    );
    let Call::Allocate(a) = &calls[1] else { panic!() };
    assert_eq!(set(a), set(&ids(2)), "the preferred ids are allocated");
    let Call::Preferred {
        available,
        must_include,
        size,
    } = &calls[2]
    else {
        panic!()
    };
    assert_eq!((available.len(), must_include.len(), *size), (6, 0, 3));
    assert!(available.iter().all(|id| !a.contains(id)));
    // Eight ids were preferred: three of the free ones among them are taken.
    let Call::Allocate(b) = &calls[3] else { panic!() };
    assert!(b.len() == 3 && set(b).is_disjoint(&set(a)), "{b:?}");
    let (Call::PreStart(first), Call::PreStart(second)) = (&calls[4], &calls[5]) else {
        panic!()
    };
    assert_eq!((set(first), set(second)), (set(a), set(b)));
    let holders = bed.node.device_manager().holders;
    assert_eq!(holders.values().map(BTreeSet::len).sum::<usize>(), 5);
    assert!(holders.keys().all(|holder| holder.pod == uid && holder.resource == RESOURCE));
}

#[tokio::test]
async fn init_containers_leave_their_ids_to_those_that_follow() {
    // As measured on a real kubelet: init 2, sidecar 1, a 3, b 1.
    let (bed, plugin) = Bed::with_plugin(10).await;
    let mut sidecar = container("s", 1);
    sidecar["restartPolicy"] = json!("Always");
    let mut init = container("i", 2);
    init["args"] = json!(["sleep", "0"]);
    let uid = bed.create(
        "p",
        json!({"initContainers": [init, sidecar], "containers": [container("a", 3), container("b", 1)]}),
    );
    bed.ready("p").await;
    let calls: Vec<Call> = plugin
        .take_calls()
        .into_iter()
        .filter(|call| !matches!(call, Call::PreStart(_)))
        .collect();
    let [
        Call::Preferred { must_include: none, .. },
        Call::Allocate(i),
        Call::Allocate(s),
        Call::Preferred {
            must_include,
            available,
            size: 3,
        },
        Call::Allocate(a),
        Call::Preferred {
            must_include: none_of_b, ..
        },
        Call::Allocate(b),
    ] = calls.as_slice()
    else {
        panic!("{calls:#?}")
    };
    assert!(none.is_empty() && none_of_b.is_empty());
    // The sidecar got one of the init container's ids without a call; the other one was in must_include.
    assert!(s.len() == 1 && set(s).is_subset(&set(i)));
    let left: BTreeSet<String> = set(i).difference(&set(s)).cloned().collect();
    assert_eq!(set(must_include), left);
    assert!(left.is_subset(&set(available)) && left.is_subset(&set(a)));
    assert!(set(b).is_disjoint(&set(a)) && set(b).is_disjoint(&set(i)));

    let holders = bed.node.device_manager().holders;
    let (_, of_a) = holders.iter().find(|(holder, _)| holder.container == "a").unwrap();
    assert_eq!(*of_a, set(a));

    let checkpoint = std::fs::read_to_string(bed.node.paths().checkpoint()).unwrap();
    let checkpoint: Value = serde_json::from_str(&checkpoint).unwrap();
    assert!(checkpoint["Checksum"].as_u64().is_some());
    let entries = checkpoint["Data"]["PodDeviceEntries"].as_array().unwrap();
    assert_eq!(entries.len(), 4);
    let entry = entries.iter().find(|entry| entry["ContainerName"] == "i").unwrap();
    assert_eq!((&entry["PodUID"], &entry["ResourceName"]), (&json!(uid), &json!(RESOURCE)));
    assert_eq!(entry["DeviceIDs"]["-1"].as_array().unwrap().len(), 2);
    let response = base64::engine::general_purpose::STANDARD
        .decode(entry["AllocResp"].as_str().unwrap())
        .unwrap();
    let response = divvy_kubelet::api::v1beta1::ContainerAllocateResponse::decode(response.as_slice()).unwrap();
    assert_eq!(response.envs["FROM_PLUGIN"], "1");
    assert_eq!(
        checkpoint["Data"]["RegisteredDevices"][RESOURCE].as_array().unwrap().len(),
        10
    );
}

#[tokio::test]
async fn during_allocate_the_pod_has_no_ids_and_later_pods_wait() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    let hold = Arc::new(Notify::new());
    plugin.change(|state| state.hold_allocate = Some(hold.clone()));
    bed.create("first", json!({"containers": [container("a", 1)]}));
    eventually("the first Allocate", || {
        plugin.count(|call| matches!(call, Call::Allocate(_))) == 1
    })
    .await;
    bed.create("second", json!({"containers": [container("a", 1)]}));
    assert!(bed.node.device_manager().holders.is_empty());
    // Admission is serial, so no call has been made for the second pod yet.
    assert_eq!(plugin.count(|call| matches!(call, Call::Preferred { .. })), 1);
    plugin.change(|state| state.hold_allocate = None);
    hold.notify_one();
    bed.ready("second").await;
    assert_eq!(bed.node.device_manager().holders.len(), 2);
}

#[tokio::test]
async fn a_refusal_at_admission_is_final_and_says_why() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    let mut events = bed.node.events();
    plugin.change(|state| state.allocate_error = Some(Status::internal("no such GPU")));
    bed.create("error", json!({"containers": [container("a", 1)]}));
    let why = "Allocate failed due to rpc error: code = Internal desc = no such GPU, which is unexpected";
    let pod = bed.phase("error", "Failed").await;
    assert_eq!(pod["status"]["reason"], "UnexpectedAdmissionError");
    assert_eq!(pod["status"]["message"], format!("Pod was rejected: {why}"));
    assert_eq!(bed.event("error", "UnexpectedAdmissionError").await, why);
    let Ok(NodeEvent::AdmissionRefused { pod, message, .. }) = events.recv().await else {
        panic!()
    };
    assert_eq!((pod.as_str(), message.as_str()), ("error", why));
    assert!(bed.node.containers().is_empty());

    let rejected = async |name: &str, spec: Value, reason: &str, text: &str| {
        bed.create(name, spec);
        let pod = bed.phase(name, "Failed").await;
        assert_eq!(pod["status"]["reason"], reason, "{name}");
        assert_eq!(pod["status"]["message"], format!("Pod was rejected: {text}"), "{name}");
    };
    let allocate = |text: &str| format!("Allocate failed due to {text}, which is unexpected");
    let one = |units: usize| json!({"containers": [container("a", units)]});
    let unexpected = "UnexpectedAdmissionError";
    plugin.change(|state| state.empty_allocate = true);
    rejected(
        "empty",
        one(1),
        unexpected,
        &allocate("no containers return in allocation response"),
    )
    .await;
    plugin.change(|state| state.empty_allocate = false);
    let many = format!("requested number of devices unavailable for {RESOURCE}. Requested: 5, Available: 4");
    rejected("many", one(5), unexpected, &allocate(&many)).await;
    let mut unhealthy = healthy(ids(4));
    unhealthy.iter_mut().for_each(|device| device.health = "Unhealthy".to_owned());
    plugin.set_devices(unhealthy);
    bed.resource_is(4, 0).await;
    let sick = format!("no healthy devices present; cannot allocate unhealthy devices {RESOURCE}");
    rejected("sick", one(1), unexpected, &allocate(&sick)).await;
    let cpu = json!({"containers": [{"name": "a", "image": "t:1", "resources": {"limits": {"cpu": "17"}}}]});
    let text = "Node didn't have enough resource: cpu, requested: 17000, used: 0, capacity: 16000";
    rejected("cpu", cpu, "OutOfcpu", text).await;
    // The kubelet ignores a resource that no plugin here manages.
    let foreign =
        json!({"containers": [{"name": "a", "image": "t:1", "args": ["run"], "resources": {"limits": {"x.example/y": "1"}}}]});
    bed.create("foreign", foreign);
    bed.ready("foreign").await;
    // Nothing was retried.
    assert_eq!(plugin.count(|call| matches!(call, Call::Allocate(_))), 2);
}

#[tokio::test]
async fn unhealthy_ids_leave_allocatable_and_come_back() {
    let (bed, plugin) = Bed::with_plugin(4).await;
    let mut devices = healthy(ids(4));
    devices[1].health = "Unhealthy".to_owned();
    plugin.set_devices(devices);
    bed.resource_is(4, 3).await;
    plugin.set_devices(healthy(ids(4)));
    bed.resource_is(4, 4).await;
    plugin.set_devices(healthy(ids(6)));
    bed.resource_is(6, 6).await;
}

#[tokio::test]
async fn a_plugin_that_is_gone_leaves_capacity_for_the_grace_period() {
    let bed = Bed::with(|spec| spec.timings.endpoint_grace = Duration::from_millis(300)).await;
    let mut plugin = TestPlugin::start(&bed.node, 3).await;
    bed.resource_is(3, 3).await;
    let uid = bed.create("p", json!({"containers": [container("a", 1)]}));
    bed.ready("p").await;
    bed.node.drop_streams();
    bed.resource_is(3, 0).await;
    // The same socket registers again.
    plugin.register().await.unwrap();
    bed.resource_is(3, 3).await;
    plugin.die();
    bed.resource_is(3, 0).await;
    bed.resource_is(0, 0).await;
    assert!(bed.container(&uid, "a").unwrap().is_running(), "pods keep running");
    plugin.serve();
    plugin.register().await.unwrap();
    bed.resource_is(3, 3).await;
    assert_eq!(bed.node.device_manager().holders.len(), 1);
}

#[tokio::test]
async fn ids_come_in_an_order_that_the_seed_decides() {
    async fn order(seed: u64) -> Vec<String> {
        let bed = Bed::with(|spec| spec.seed = seed).await;
        let plugin = TestPlugin::serving(&bed.node, "test.sock", 16);
        plugin.change(|state| state.no_preferred = true);
        plugin.register().await.unwrap();
        bed.resource_is(16, 16).await;
        bed.create("p", json!({"containers": [container("a", 16)]}));
        bed.ready("p").await;
        match plugin.take_calls().remove(0) {
            Call::Allocate(ids) => ids,
            other => panic!("{other:?}"),
        }
    }
    let (one, again, two) = (order(1).await, order(1).await, order(2).await);
    assert_eq!(one, again);
    assert_ne!(one, two);
    assert_eq!(set(&one), set(&ids(16)));
}

#[tokio::test]
async fn pods_of_one_batch_can_be_admitted_in_another_order() {
    async fn order(seed: u64) -> Vec<String> {
        let bed = Bed::with(|spec| {
            spec.seed = seed;
            spec.admission = AdmissionOrder::Shuffled {
                window: Duration::from_millis(100),
            };
        })
        .await;
        let mut events = bed.node.events();
        for i in 0..6 {
            let mut pod = container("a", 0);
            pod["resources"]["limits"] = json!({"cpu": "17"});
            bed.create(&format!("p{i}"), json!({"containers": [pod]}));
        }
        let mut order = Vec::new();
        while order.len() < 6 {
            if let NodeEvent::AdmissionRefused { pod, .. } = events.recv().await.unwrap() {
                order.push(pod);
            }
        }
        order
    }
    let one = order(1).await;
    let sorted: Vec<String> = (0..6).map(|i| format!("p{i}")).collect();
    assert!(one != sorted || order(2).await != sorted, "{one:?}");
    assert_eq!(one, order(1).await);
}

#[tokio::test]
async fn a_directory_that_is_too_deep_for_a_socket_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let api = divvy_testbed::api::ApiServer::new(Default::default());
    let root = directory.path().join("d".repeat(100));
    let error = Node::start(api.client(), NodeSpec::new("n1", &root)).await.unwrap_err();
    let text = error.to_string();
    assert!(text.contains("at most 107") && text.contains("shorter directory"), "{text}");
    assert!(!root.exists());
}

#[tokio::test]
async fn pods_without_devices_ask_nobody() {
    let (bed, plugin) = Bed::with_plugin(2).await;
    bed.create("p", json!({"containers": [plain("a", &["run"])]}));
    let pod = bed.ready("p").await;
    assert_eq!(pod["status"]["phase"], "Running");
    assert_eq!(plugin.take_calls(), []);
}
