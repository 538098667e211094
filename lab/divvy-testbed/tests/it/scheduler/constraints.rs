//! Constraints other than sums that keep pods off nodes: taints, affinity, spread, ports, and gates; and evictions for a pod with
//! such a constraint.

use super::*;

/// Create three nodes: n1 and n2 in zone a, n3 in zone b; n1 is tainted.
fn zones(api: &ApiServer) {
    for (name, zone) in [("n1", "a"), ("n2", "a"), ("n3", "b")] {
        node(api, name, 16);
        let labels = json!({"metadata": {"labels": {"zone": zone, "kubernetes.io/hostname": name}}});
        api.patch("nodes", "", name, PatchKind::Merge, &labels).unwrap();
    }
    let taint = json!({"spec": {"taints": [{"key": "dedicated", "value": "gpu", "effect": "NoSchedule"}]}});
    api.patch("nodes", "", "n1", PatchKind::Merge, &taint).unwrap();
}

/// Create a pod with the label `app` and further fields of its spec.
fn constrained(api: &ApiServer, name: &str, app: &str, spec: &Value) {
    let mut pod =
        json!({"metadata": {"name": name, "labels": {"app": app}}, "spec": {"containers": [{"name": "a", "image": "t:1"}]}});
    for (field, value) in spec.as_object().into_iter().flatten() {
        pod["spec"][field] = value.clone();
    }
    api.create("pods", pod).unwrap();
}

fn terms(kind: &str, key: &str, app: &str, more: &Value) -> Value {
    let mut term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}});
    for (field, value) in more.as_object().into_iter().flatten() {
        term[field] = value.clone();
    }
    json!({"affinity": {kind: {"requiredDuringSchedulingIgnoredDuringExecution": [term]}}})
}

async fn node_of(api: &ApiServer, name: &str) -> String {
    bound(api, name).await["spec"]["nodeName"].as_str().unwrap().to_owned()
}

fn quick() -> SchedulerConfig {
    let mut config = SchedulerConfig::default();
    config.backoff.first = Duration::from_millis(20);
    config.backoff.max = Duration::from_millis(40);
    config
}

#[tokio::test]
async fn taints_and_node_affinity_say_where_a_pod_may_go() {
    let api = api();
    zones(&api);
    let _scheduler = Scheduler::start(api.client(), quick());
    let tolerations = json!([{"key": "dedicated", "operator": "Exists"}]);
    let affinity = |zones: &[&str]| {
        let term = json!({"matchExpressions": [{"key": "zone", "operator": "In", "values": zones}]});
        json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}})
    };
    let host = |name: &str| json!({"kubernetes.io/hostname": name});
    constrained(
        &api,
        "tolerant",
        "",
        &json!({"tolerations": tolerations, "nodeSelector": host("n1"), "affinity": affinity(&["a"])}),
    );
    assert_eq!(node_of(&api, "tolerant").await, "n1");
    constrained(&api, "elsewhere", "", &json!({"affinity": affinity(&["b"])}));
    assert_eq!(node_of(&api, "elsewhere").await, "n3");
    constrained(&api, "lost", "", &json!({"affinity": affinity(&["c", "d"])}));
    assert_eq!(
        refused(&api, "lost", "Unschedulable").await,
        "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match Pod's node affinity/selector."
    );
    // The node changes, and the pod that waits for it is tried again.
    let labels = json!({"metadata": {"labels": {"zone": "d"}}, "spec": {"taints": null}});
    api.patch("nodes", "", "n1", PatchKind::Merge, &labels).unwrap();
    assert_eq!(node_of(&api, "lost").await, "n1");
}

#[tokio::test]
async fn pods_spread_over_zones_and_a_pod_that_ends_makes_room() {
    let api = api();
    zones(&api);
    let _scheduler = Scheduler::start(api.client(), quick());
    let spread = json!({"topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule",
        "labelSelector": {"matchLabels": {"app": "web"}}}]});
    let mut zones = Vec::new();
    for name in ["web-1", "web-2"] {
        constrained(&api, name, "web", &spread);
        zones.push(node_of(&api, name).await);
    }
    zones.sort();
    assert_eq!(zones, ["n2", "n3"], "one in each zone");
    // One more pod in zone b bypasses the constraint.
    constrained(&api, "web-3", "web", &json!({"nodeSelector": {"zone": "b"}}));
    bound(&api, "web-3").await;
    let cordon = json!({"spec": {"unschedulable": true}});
    api.patch("nodes", "", "n2", PatchKind::Merge, &cordon).unwrap();
    constrained(&api, "web-4", "web", &spread);
    assert_eq!(
        refused(&api, "web-4", "Unschedulable").await,
        "0/3 nodes are available: 1 node(s) didn't match pod topology spread constraints, 1 node(s) had untolerated taint(s), \
         1 node(s) were unschedulable."
    );
    delete(&api, "web-3");
    assert_eq!(node_of(&api, "web-4").await, "n3");
}

#[tokio::test]
async fn a_pod_waits_for_pods_that_it_wants_to_be_near_and_is_woken_by_them() {
    let api = api();
    zones(&api);
    let _scheduler = Scheduler::start(api.client(), quick());
    let none = "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't match pod affinity rules.";
    constrained(&api, "friend", "", &terms("podAffinity", "zone", "db", &json!(null)));
    assert_eq!(refused(&api, "friend", "Unschedulable").await, none);
    // A matching pod is created.
    constrained(&api, "db", "db", &json!({"nodeSelector": {"zone": "b"}}));
    assert_eq!(node_of(&api, "friend").await, "n3");
    // A bound pod gets the label.
    constrained(&api, "second", "", &terms("podAffinity", "zone", "cache", &json!(null)));
    assert_eq!(refused(&api, "second", "Unschedulable").await, none);
    let cache = json!({"metadata": {"labels": {"app": "cache"}}});
    api.patch("pods", "default", "db", PatchKind::Merge, &cache).unwrap();
    assert_eq!(node_of(&api, "second").await, "n3");
}

#[tokio::test]
async fn a_namespace_that_gets_the_label_wakes_a_pod_that_waits_for_pods_there() {
    let api = api();
    zones(&api);
    api.create("namespaces", json!({"metadata": {"name": "data"}})).unwrap();
    // The pod is bound from the start, so it wakes no other pod.
    let db = json!({"metadata": {"name": "db", "namespace": "data", "labels": {"app": "db"}},
        "spec": {"nodeName": "n2", "containers": [{"name": "a", "image": "t:1"}]}});
    api.create("pods", db).unwrap();
    let _scheduler = Scheduler::start(api.client(), quick());
    let stores = json!({"namespaceSelector": {"matchLabels": {"kind": "store"}}});
    constrained(
        &api,
        "friend",
        "",
        &terms("podAffinity", "kubernetes.io/hostname", "db", &stores),
    );
    refused(&api, "friend", "Unschedulable").await;
    let store = json!({"metadata": {"labels": {"kind": "store"}}});
    api.patch("namespaces", "", "data", PatchKind::Merge, &store).unwrap();
    assert_eq!(node_of(&api, "friend").await, "n2");
}

#[tokio::test]
async fn anti_affinity_and_host_ports_keep_pods_apart_on_both_sides() {
    let api = api();
    zones(&api);
    let _scheduler = Scheduler::start(api.client(), quick());
    let mut shy = terms("podAntiAffinity", "zone", "web", &json!(null));
    shy["nodeSelector"] = json!({"zone": "a"});
    constrained(&api, "shy", "", &shy);
    bound(&api, "shy").await;
    constrained(&api, "web", "web", &json!(null));
    assert_eq!(
        node_of(&api, "web").await,
        "n3",
        "zone a has a pod whose anti-affinity excludes it"
    );
    constrained(&api, "second", "", &terms("podAntiAffinity", "zone", "web", &json!(null)));
    assert_eq!(node_of(&api, "second").await, "n2");
    constrained(&api, "late", "web", &json!({"nodeSelector": {"zone": "a"}}));
    assert_eq!(
        refused(&api, "late", "Unschedulable").await,
        "0/3 nodes are available: 1 node(s) didn't match Pod's node affinity/selector, 1 node(s) didn't satisfy existing pods \
         anti-affinity rules, 1 node(s) had untolerated taint(s)."
    );
    let port = json!({"containers": [{"name": "a", "image": "t:1", "ports": [{"containerPort": 80, "hostPort": 80}]}]});
    let mut nodes = Vec::new();
    for name in ["port-1", "port-2"] {
        constrained(&api, name, "", &port);
        nodes.push(node_of(&api, name).await);
    }
    nodes.sort();
    assert_eq!(nodes, ["n2", "n3"]);
    constrained(&api, "port-3", "", &port);
    assert_eq!(
        refused(&api, "port-3", "Unschedulable").await,
        "0/3 nodes are available: 1 node(s) had untolerated taint(s), 2 node(s) didn't have free ports for the requested pod ports."
    );
}

#[tokio::test]
async fn a_gated_pod_is_left_alone_until_its_last_gate_is_gone() {
    let api = api();
    zones(&api);
    let _scheduler = Scheduler::start(api.client(), quick());
    constrained(
        &api,
        "gated",
        "",
        &json!({"schedulingGates": [{"name": "one"}, {"name": "two"}]}),
    );
    let one_less = json!({"spec": {"schedulingGates": [{"name": "two"}]}});
    api.patch("pods", "default", "gated", PatchKind::Merge, &one_less).unwrap();
    // A pod that was created later is placed earlier.
    constrained(&api, "open", "", &json!(null));
    bound(&api, "open").await;
    let gated = api.get("pods", "default", "gated").unwrap();
    assert_eq!(
        (&gated["spec"]["nodeName"], &gated["status"]["conditions"][0]["reason"]),
        (&Value::Null, &json!("SchedulingGated"))
    );
    let open = json!({"spec": {"schedulingGates": null}});
    api.patch("pods", "default", "gated", PatchKind::Merge, &open).unwrap();
    let conditions = bound(&api, "gated").await["status"]["conditions"].clone();
    assert_eq!(
        (&conditions[0]["type"], &conditions[0]["status"]),
        (&json!("PodScheduled"), &json!("True"))
    );
}

#[tokio::test]
async fn a_pod_evicts_who_is_in_the_way_of_its_ports_and_its_anti_affinity_unless_its_class_never_preempts() {
    let api = api();
    zones(&api);
    let _scheduler = Scheduler::start(api.client(), quick());
    for (name, policy) in [("gentle", "Never"), ("urgent", "PreemptLowerPriority")] {
        let class = json!({"metadata": {"name": name}, "value": 1000, "preemptionPolicy": policy});
        api.create("priorityclasses.scheduling.k8s.io", class).unwrap();
    }
    let with = |mut spec: Value, class: &str| {
        spec["priorityClassName"] = class.into();
        spec["containers"] = json!([{"name": "a", "image": "t:1", "ports": [{"containerPort": 80, "hostPort": 80}]}]);
        spec
    };
    let b = json!({"nodeSelector": {"zone": "b"}});
    constrained(&api, "holder", "", &with(b.clone(), ""));
    constrained(&api, "web", "web", &b);
    for name in ["holder", "web"] {
        bound(&api, name).await;
    }
    constrained(&api, "gentle", "", &with(b.clone(), "gentle"));
    refused(&api, "gentle", "Unschedulable").await;
    // The refusal of a pod behind it in the queue shows that the gentle pod had its chance.
    constrained(&api, "later", "", &with(b.clone(), ""));
    refused(&api, "later", "Unschedulable").await;
    let gentle = api.get("pods", "default", "gentle").unwrap();
    assert!(gentle["status"]["nominatedNodeName"].is_null() && !deleted(&api, "holder"));
    for name in ["gentle", "later"] {
        delete(&api, name);
    }
    let mut apart = terms("podAntiAffinity", "zone", "web", &json!(null));
    apart["nodeSelector"] = b["nodeSelector"].clone();
    constrained(&api, "urgent", "", &with(apart, "urgent"));
    let nominated = pod_until(&api, "urgent", |pod| pod["status"]["nominatedNodeName"].is_string()).await;
    assert_eq!(nominated["status"]["nominatedNodeName"], "n3");
    for name in ["holder", "web"] {
        pod_until(&api, name, |pod| pod["metadata"]["deletionTimestamp"].is_string()).await;
        delete(&api, name);
    }
    assert_eq!(node_of(&api, "urgent").await, "n3");
}
