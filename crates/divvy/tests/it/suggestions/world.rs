//! Random clusters, as objects of the API server.

use divvy_model::names;
use divvy_testbed::api::{ApiServer, DeleteOptions, PatchKind};
use divvy_why::Change;
use proptest::prelude::*;
use proptest::sample::select;
use serde_json::{Value, json};

/// A random cluster: nodes, the pods on them, and the pod that waits.
#[derive(Debug, Clone)]
pub(super) struct World {
    pub(super) nodes: Vec<Value>,
    pub(super) pods: Vec<Value>,
    pub(super) namespaces: Vec<Value>,
    pub(super) asking: Value,
}

const GIB: u64 = 1024;

/// A node before its pods are placed.
#[derive(Debug, Clone)]
struct Draft {
    node: Value,
    /// The GPUs, each with its UUID, its free memory in GiB, and whether it is healthy.
    gpus: Vec<(String, u64, bool)>,
    tenants: Vec<Tenant>,
}

#[derive(Debug, Clone)]
struct Tenant {
    gpu: usize,
    units: u64,
    cores: u32,
    cpu: u64,
    app: &'static str,
    namespace: &'static str,
    apart: Option<&'static str>,
    odd: usize,
}

fn rarely<T: std::fmt::Debug + Clone + 'static>(
    one_in: u32,
    value: impl Strategy<Value = T> + 'static,
) -> impl Strategy<Value = Option<T>> {
    prop_oneof![one_in - 1 => Just(None), 1 => value.prop_map(Some)]
}

fn taints() -> impl Strategy<Value = Vec<Value>> {
    let taint = select(vec![
        json!({"key": "team", "value": "red", "effect": "NoSchedule"}),
        json!({"key": "nvidia.com/gpu", "effect": "NoSchedule"}),
        json!({"key": "team", "value": "blue", "effect": "NoExecute"}),
        json!({"key": "soft", "effect": "PreferNoSchedule"}),
        json!({"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"}),
        json!({"key": "node-role.kubernetes.io/control-plane", "effect": "NoSchedule"}),
    ]);
    prop_oneof![6 => Just(Vec::new()), 2 => taint.clone().prop_map(|taint| vec![taint]), 1 => proptest::collection::vec(taint, 2)]
}

fn tenant() -> impl Strategy<Value = Tenant> {
    let place = (0..3usize, 0..14u64, 0..3u64, select(vec![0_u32, 0, 40, 80]));
    let who = (select(vec!["db", "web"]), select(vec!["default", "default", "other"]));
    (
        place,
        who,
        rarely(8, select(vec!["zone", "kubernetes.io/hostname"])),
        0..12usize,
    )
        .prop_map(|((gpu, units, cpu, cores), (app, namespace), apart, odd)| Tenant {
            gpu,
            units,
            cores,
            cpu,
            app,
            namespace,
            apart,
            odd,
        })
}

fn draft() -> impl Strategy<Value = Draft> {
    let gpus = proptest::collection::vec((select(vec![8u64, 16, 24]), 0..10u8, select(vec!["A100", "T4"])), 0..3);
    let labels = (rarely(2, select(vec!["ssd", "hdd"])), rarely(2, select(vec!["a", "b"])));
    let state = (taints(), 0..5u8, 0..10u8, 0..10u8, 2..5u64, 0..8u8);
    let tenants = proptest::collection::vec(tenant(), 0..4);
    (gpus, labels, state, tenants).prop_map(|(gpus, (disk, zone), (taints, cordoned, ready, away, pods, held), tenants)| {
        let uuid = |index: usize| format!("GPU-NODE-{index}");
        let list: Vec<Value> = gpus
            .iter()
            .enumerate()
            .map(|(index, (gib, health, model))| {
                json!({"uuid": uuid(index), "kind": "gpu", "parent": null, "index": index, "minor": index, "model": model, "cc": "8.0",
                    "totalMiB": gib * GIB, "reserveMiB": 0, "units": gib, "heldMiB": if held == 0 && index == 0 { 4 * GIB } else { 0 }, "numa": 0,
                    "health": if *health == 0 { "failed" } else { "ok" }, "reason": if *health == 0 { json!("XID 79") } else { Value::Null },
                    "enforcement": if *health == 1 { "cgroup" } else { "guard" }, "links": []})
            })
            .collect();
        let units = |well: bool| gpus.iter().filter(|(_, health, _)| !well || *health > 0).map(|(gib, ..)| gib).sum::<u64>();
        let mut labels = json!({"kubernetes.io/hostname": "NODE"});
        if let Some(disk) = disk {
            labels["disk"] = json!(disk);
        }
        if let Some(zone) = zone {
            labels["zone"] = json!(zone);
        }
        let mut amounts = json!({"cpu": "4", "memory": "8Gi", "pods": pods.to_string()});
        let mut annotations = json!({});
        if !gpus.is_empty() {
            amounts[names::GPU_MEM] = json!(units(false).to_string());
            amounts[names::GPU_COUNT] = json!(gpus.len().to_string());
            annotations[names::INVENTORY] =
                json!(json!({"v": 1, "agent": "0.1.0", "driver": "550.54.15", "unitMiB": GIB, "gpus": list}).to_string());
        }
        let mut allocatable = amounts.clone();
        if !gpus.is_empty() {
            let offered = if away == 0 { 0 } else { units(true) };
            allocatable[names::GPU_MEM] = json!(offered.to_string());
        }
        let ready = if ready == 0 { "False" } else { "True" };
        let node = json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "NODE", "labels": labels, "annotations": annotations},
            "spec": {"taints": taints, "unschedulable": cordoned == 0},
            "status": {"capacity": amounts, "allocatable": allocatable, "conditions": [{"type": "Ready", "status": ready}]}});
        let gpus = gpus.iter().enumerate().map(|(index, (gib, health, _))| (uuid(index), *gib, *health > 0));
        Draft {
            node,
            gpus: gpus.collect(),
            tenants,
        }
    })
}

fn selector_between() -> impl Strategy<Value = Value> {
    (
        select(vec!["zone", "kubernetes.io/hostname", "disk"]),
        select(vec!["db", "web"]),
        0..4u8,
    )
        .prop_map(|(key, app, namespaces)| {
            let mut term = json!({"topologyKey": key, "labelSelector": {"matchLabels": {"app": app}}});
            match namespaces {
                0 => term["namespaces"] = json!(["other"]),
                1 => term["namespaceSelector"] = json!({}),
                2 => term["namespaceSelector"] = json!({"matchLabels": {"team": "red"}}),
                _ => {}
            }
            term
        })
}

fn node_terms() -> impl Strategy<Value = Value> {
    let expression = select(vec![
        json!({"key": "disk", "operator": "In", "values": ["ssd"]}),
        json!({"key": "disk", "operator": "NotIn", "values": ["hdd"]}),
        json!({"key": "zone", "operator": "Exists"}),
        json!({"key": "zone", "operator": "DoesNotExist"}),
    ]);
    let term = proptest::collection::vec(expression, 0..3).prop_map(|list| json!({"matchExpressions": list}));
    proptest::collection::vec(term, 1..3).prop_map(Value::Array)
}

fn asking() -> impl Strategy<Value = Value> {
    let amounts = (1..20u64, 0..20u8, 0..4u64, rarely(6, Just(())));
    let rules = (
        rarely(8, select(vec!["A100", "H100*", "!T4"])),
        rarely(8, Just(())),
        rarely(3, select(vec!["30", "60", "100"])),
    );
    let places = (
        rarely(
            3,
            select(vec![
                ("disk", "ssd"),
                ("zone", "a"),
                ("kubernetes.io/hostname", "n0"),
                ("rack", "r1"),
            ]),
        ),
        rarely(6, node_terms()),
        rarely(6, selector_between()),
        rarely(6, selector_between()),
        rarely(6, (select(vec!["zone", "kubernetes.io/hostname"]), 1..3u8, 0..3u8)),
    );
    let others = (
        rarely(
            3,
            select(vec![
                json!({"key": "team", "operator": "Exists"}),
                json!({"operator": "Exists"}),
            ]),
        ),
        rarely(12, Just(())),
        select(vec!["db", "web"]),
        0..2u8,
        rarely(10, Just(())),
    );
    (amounts, rules, places, others).prop_map(
        |((units, suffix, cpu, port), (model, two, cores), (selector, terms, with, apart, spread), (tolerates, gate, app, priority, extra))| {
            let quantity = if suffix == 0 { format!("{units}Gi") } else { units.to_string() };
            let units = if two.is_some() { json!((units * 2).to_string()) } else { json!(quantity) };
            let mut container = json!({"name": "main", "image": "i", "resources": {"limits": {"cpu": cpu.to_string()}}});
            container["resources"]["limits"][names::GPU_MEM] = units;
            if port.is_some() {
                container["ports"] = json!([{"containerPort": 80, "hostPort": 8080, "protocol": "TCP"}]);
            }
            if extra.is_some() {
                container["resources"]["limits"]["example.com/fpga"] = json!("1");
            }
            container["resources"]["requests"] = container["resources"]["limits"].clone();
            let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
                "metadata": {"name": "asking", "namespace": "default", "uid": "u-asking", "labels": {"app": app}, "annotations": {}},
                "spec": {"schedulerName": "default-scheduler", "containers": [container], "priority": 0},
                "status": {"phase": "Pending"}});
            if priority == 1 {
                // A higher priority than some pods, but without preemption.
                pod["spec"]["preemptionPolicy"] = json!("Never");
                pod["spec"]["priority"] = json!(5);
            }
            if let Some(model) = model {
                pod["metadata"]["annotations"][names::GPU_MODEL] = json!(model);
            }
            if let Some(cores) = cores {
                pod["metadata"]["annotations"][names::GPU_CORES] = json!(cores);
            }
            if two.is_some() {
                pod["metadata"]["annotations"][names::GPUS] = json!("2");
            }
            if let Some((key, value)) = selector {
                pod["spec"]["nodeSelector"] = json!({key: value});
            }
            let mut affinity = json!({});
            if let Some(terms) = terms {
                affinity["nodeAffinity"] = json!({"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}});
            }
            if let Some(term) = with {
                affinity["podAffinity"] = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]});
            }
            if let Some(term) = apart {
                affinity["podAntiAffinity"] = json!({"requiredDuringSchedulingIgnoredDuringExecution": [term]});
            }
            pod["spec"]["affinity"] = affinity;
            if let Some((key, skew, policy)) = spread {
                let mut constraint = json!({"maxSkew": skew, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {"matchLabels": {"app": app}}});
                match policy {
                    0 => constraint["nodeTaintsPolicy"] = json!("Honor"),
                    1 => constraint["nodeAffinityPolicy"] = json!("Ignore"),
                    _ => {}
                }
                pod["spec"]["topologySpreadConstraints"] = json!([constraint]);
            }
            if let Some(toleration) = tolerates {
                pod["spec"]["tolerations"] = json!([toleration]);
            }
            if gate.is_some() {
                pod["spec"]["schedulingGates"] = json!([{"name": "example.com/wait"}]);
            }
            pod
        },
    )
}

/// Return a proptest strategy for arbitrary worlds.
pub(super) fn any() -> impl Strategy<Value = World> {
    (proptest::collection::vec(draft(), 1..5), asking()).prop_map(|(drafts, asking)| {
        let mut world = World {
            nodes: Vec::new(),
            pods: Vec::new(),
            namespaces: vec![
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "default"}}),
                json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "other", "labels": {"team": "red"}}}),
            ],
            asking,
        };
        for (number, draft) in drafts.into_iter().enumerate() {
            world.add(number, draft);
        }
        world
    })
}

impl World {
    fn add(&mut self, number: usize, draft: Draft) {
        let named = |text: &str| text.replace("NODE", &format!("n{number}"));
        let node: Value = serde_json::from_str(&named(&draft.node.to_string())).expect("JSON");
        self.nodes.push(node);
        let mut gpus = draft.gpus;
        for (position, tenant) in draft.tenants.into_iter().enumerate() {
            let gpu = gpus.get_mut(tenant.gpu).filter(|(_, left, _)| *left >= tenant.units);
            let units = gpu.as_ref().map_or(0, |_| tenant.units);
            let mut annotations = json!({});
            if let Some((uuid, left, _)) = gpu.filter(|_| units > 0) {
                *left -= units;
                let cores = tenant.cores;
                let share = json!([{"uuid": named(uuid), "memMiB": units * GIB, "cores": cores, "whole": false}]);
                let of_main = json!([{"uuid": named(uuid), "memMiB": units * GIB, "cores": cores}]);
                annotations[names::ALLOCATION] =
                    json!(json!({"v": 1, "gpus": share, "containers": {"main": of_main}}).to_string());
            }
            self.pods.push(pod_of(
                &tenant,
                units,
                &format!("p{number}-{position}"),
                &format!("n{number}"),
                &annotations,
            ));
        }
    }

    /// Report whether the pod has a scheduling gate. Schedulers ignore such a pod.
    pub(super) fn is_gated(&self) -> bool {
        self.asking["spec"]["schedulingGates"]
            .as_array()
            .is_some_and(|gates| !gates.is_empty())
    }

    /// Apply a change to the objects.
    pub(super) fn carry_out(&mut self, change: &Change) {
        let node = |nodes: &mut Vec<Value>, name: &str, alter: &dyn Fn(&mut Value)| {
            let found = nodes.iter_mut().find(|node| node["metadata"]["name"] == name);
            alter(found.expect("the node is there"));
        };
        match change {
            Change::PodEnds { uid, .. } => self.pods.retain(|pod| pod["metadata"]["uid"] != uid.as_str()),
            Change::LeftoversEnd { node: name } => node(&mut self.nodes, name, &|node| {
                let text = node["metadata"]["annotations"][names::INVENTORY]
                    .as_str()
                    .expect("it has one");
                let mut inventory: Value = serde_json::from_str(text).expect("JSON");
                for gpu in inventory["gpus"].as_array_mut().expect("a list") {
                    gpu["heldMiB"] = json!(0);
                }
                node["metadata"]["annotations"][names::INVENTORY] = json!(inventory.to_string());
            }),
            Change::Uncordon { node: name } => node(&mut self.nodes, name, &|node| node["spec"]["unschedulable"] = json!(false)),
            Change::Label {
                node: name,
                label,
                value,
            } => {
                node(&mut self.nodes, name, &|node| {
                    node["metadata"]["labels"][label] = json!(value)
                });
            }
            Change::AskFor { units } => self.ask(names::GPU_MEM, &units.to_string()),
            Change::AskForCores { cores } => {
                self.asking["metadata"]["annotations"][names::GPU_CORES] = json!(cores.to_string());
            }
            Change::AskForLess { resource, amount } if resource == "cpu" => self.ask(resource, &format!("{amount}m")),
            Change::AskForLess { resource, amount } => self.ask(resource, &amount.to_string()),
            Change::DropSelector { label, .. } => {
                let selector = self.asking["spec"]["nodeSelector"].as_object_mut();
                selector.expect("it has one").remove(label);
            }
            Change::Tolerate { key, value, effect } => {
                let toleration = match value.as_str() {
                    "" => json!({"key": key, "operator": "Exists", "effect": effect}),
                    value => json!({"key": key, "value": value, "effect": effect}),
                };
                let mut list = self.asking["spec"]["tolerations"].as_array().cloned().unwrap_or_default();
                list.push(toleration);
                self.asking["spec"]["tolerations"] = json!(list);
            }
        }
    }

    fn ask(&mut self, resource: &str, amount: &str) {
        let resources = &mut self.asking["spec"]["containers"][0]["resources"];
        for kind in ["limits", "requests"] {
            resources[kind][resource] = json!(amount);
        }
    }

    /// Create the objects. The waiting pod is created last.
    pub(super) fn create(&self, api: &ApiServer) {
        for (name, value, policy) in [("five", 5, "Never"), ("ten", 10, "PreemptLowerPriority")] {
            let class = json!({"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}, "value": value,
                "preemptionPolicy": policy});
            // The server still has the object of an earlier world.
            let _ = api.create("priorityclasses.scheduling.k8s.io", class);
        }
        for node in &self.nodes {
            api.create("nodes", node.clone()).expect("it is made");
        }
        for namespace in &self.namespaces {
            // Some objects exist from the start.
            let _ = api.create("namespaces", namespace.clone());
        }
        for pod in &self.pods {
            let deleting = !pod["metadata"]["deletionTimestamp"].is_null();
            let pod = new(pod);
            api.create("pods", pod.clone()).expect("it is made");
            let status = json!({"status": {"phase": "Running"}});
            let text = |key: &str| pod["metadata"][key].as_str().unwrap_or_default().to_owned();
            let (namespace, name) = (text("namespace"), text("name"));
            api.patch("pods/status", &namespace, &name, PatchKind::Merge, &status)
                .expect("it runs");
            if deleting {
                api.delete("pods", &namespace, &name, &DeleteOptions::default())
                    .expect("it is asked to end");
            }
        }
        self.create_asking(api);
    }

    fn create_asking(&self, api: &ApiServer) {
        api.create("pods", new(&self.asking)).expect("it is made");
    }

    /// Apply a change on the API server. If the change affects a pod's request, create a new pod.
    pub(super) fn carry_out_on(&self, api: &ApiServer, change: &Change) {
        let now = DeleteOptions {
            grace_period_s: Some(0),
            ..DeleteOptions::default()
        };
        let mut changed = self.clone();
        match change {
            Change::PodEnds { pod, .. } => {
                let pod = pod.as_ref().expect("who may see everything is told its name");
                api.delete("pods", &pod.namespace, &pod.name, &now).expect("it ends");
            }
            Change::Uncordon { node } | Change::Label { node, .. } | Change::LeftoversEnd { node } => {
                changed.carry_out(change);
                let object = changed
                    .nodes
                    .iter()
                    .find(|object| object["metadata"]["name"] == node.as_str())
                    .expect("it is there");
                let metadata = json!({"labels": object["metadata"]["labels"], "annotations": object["metadata"]["annotations"]});
                let patch = json!({"metadata": metadata, "spec": {"unschedulable": object["spec"]["unschedulable"]}});
                api.patch("nodes", "", node, PatchKind::Merge, &patch).expect("it is changed");
            }
            _ => {
                changed.carry_out(change);
                api.delete("pods", "default", "asking", &now).expect("it goes");
                changed.create_asking(api);
            }
        }
    }

    /// Return all created objects that still exist, each with its resource.
    pub(super) fn objects(&self, api: &ApiServer) -> Vec<(&'static str, Value)> {
        let all = |resource: &'static str| {
            let listed = ["", "default", "other"].map(|namespace| api.list(resource, namespace).unwrap_or_default());
            let mut objects: Vec<Value> = listed.concat();
            objects.sort_by_key(|object| object["metadata"]["uid"].to_string());
            objects.dedup_by_key(|object| object["metadata"]["uid"].to_string());
            objects.into_iter().map(move |object| (resource, object))
        };
        all("pods").chain(all("nodes")).collect()
    }
}

/// Return a pod's manifest without the fields that the API server adds.
fn new(pod: &Value) -> Value {
    let mut pod = pod.clone();
    let class = match pod["spec"]["priority"].as_i64() {
        Some(5) => json!("five"),
        Some(10) => json!("ten"),
        _ => Value::Null,
    };
    if let Some(meta) = pod["metadata"].as_object_mut() {
        meta.remove("uid");
        meta.remove("deletionTimestamp");
    }
    if let Some(spec) = pod["spec"].as_object_mut() {
        spec.remove("priority");
        spec.remove("preemptionPolicy");
        if !class.is_null() {
            spec.insert("priorityClassName".to_owned(), class);
        }
    }
    pod
}

fn pod_of(tenant: &Tenant, units: u64, name: &str, node: &str, annotations: &Value) -> Value {
    let mut limits = json!({"cpu": tenant.cpu.to_string()});
    if units > 0 {
        limits[names::GPU_MEM] = json!(units.to_string());
    }
    let mut container = json!({"name": "main", "image": "i", "resources": {"limits": limits.clone(), "requests": limits}});
    if tenant.odd == 1 {
        container["ports"] = json!([{"containerPort": 80, "hostPort": 8080, "protocol": "TCP"}]);
    }
    let mut pod = json!({"apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": tenant.namespace, "uid": format!("u-{name}"), "labels": {"app": tenant.app}, "annotations": annotations},
        "spec": {"schedulerName": "default-scheduler", "nodeName": node, "containers": [container], "priority": if tenant.odd == 2 { 10 } else { 0 }},
        "status": {"phase": "Running"}});
    match tenant.odd {
        3 => pod["metadata"]["deletionTimestamp"] = json!("2026-01-01T00:00:00Z"),
        4 => {
            pod["metadata"]["ownerReferences"] =
                json!([{"apiVersion": "batch/v1", "kind": "Job", "name": "j", "uid": "u-j", "controller": true}])
        }
        _ => {}
    }
    if let Some(key) = tenant.apart {
        pod["spec"]["affinity"] = json!({"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
            {"topologyKey": key, "labelSelector": {"matchLabels": {"app": tenant.app}}}]}});
    }
    pod
}
