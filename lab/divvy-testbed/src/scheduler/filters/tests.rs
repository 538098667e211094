use serde_json::{Value, json};

use super::super::cases;
use super::*;

fn map(of: &[(&str, u64)]) -> BTreeMap<String, u64> {
    of.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
}

fn reasons(pod: &SchedulerPod, node: &SchedulerNode, used: &BTreeMap<String, u64>) -> Vec<String> {
    let (nodes, namespaces) = (BTreeMap::from([("n".to_owned(), node.clone())]), BTreeMap::new());
    let cluster = ClusterView {
        nodes: &nodes,
        pods: Vec::new(),
        namespaces: &namespaces,
    };
    let taken = Taken {
        requests: used.clone(),
        ports: Vec::new(),
    };
    let refusal = Cycle::new(pod, &cluster).refusal(node, &taken);
    refusal.map(|refusal| refusal.reasons).unwrap_or_default()
}

#[test]
fn a_pod_fits_where_the_sums_allow_it() {
    let node = SchedulerNode {
        allocatable: map(&[("cpu", 4000), ("pods", 2), ("aliyun.com/gpu-mem", 16)]),
        ready: true,
        ..SchedulerNode::default()
    };
    let pod = |mem: u64| SchedulerPod {
        requests: map(&[("pods", 1), ("aliyun.com/gpu-mem", mem)]),
        ..SchedulerPod::default()
    };
    for (mem, used, expected) in [
        (16, map(&[]), vec![]),
        (4, map(&[("aliyun.com/gpu-mem", 12)]), vec![]),
        (5, map(&[("aliyun.com/gpu-mem", 12)]), vec!["Insufficient aliyun.com/gpu-mem"]),
        (
            17,
            map(&[("pods", 2)]),
            vec!["Too many pods", "Insufficient aliyun.com/gpu-mem"],
        ),
    ] {
        assert_eq!(reasons(&pod(mem), &node, &used), expected);
    }
    let closed = SchedulerNode {
        unschedulable: true,
        ..node.clone()
    };
    assert_eq!(reasons(&pod(1), &closed, &map(&[])), ["node(s) were unschedulable"]);
    let lost = SchedulerNode {
        ready: false,
        ..node.clone()
    };
    assert_eq!(reasons(&pod(1), &lost, &map(&[])), ["node(s) had untolerated taint(s)"]);
    let picky = SchedulerPod {
        node_selector: BTreeMap::from([("disk".to_owned(), "ssd".to_owned())]),
        ..pod(1)
    };
    assert_eq!(
        reasons(&picky, &node, &map(&[])),
        ["node(s) didn't match Pod's node affinity/selector"]
    );
}

/// Return a pod that every filter refuses, except the first `without` filters.
fn troubled(without: usize) -> (cases::ClusterBuilder, Pod) {
    let tolerations = [
        json!({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoSchedule"}),
        json!({"key": "dedicated", "operator": "Exists"}),
    ];
    let shy = json!([{"topologyKey": "node", "labelSelector": {"matchLabels": {"app": "web"}}}]);
    let mut spec = json!({
        "tolerations": tolerations.iter().take(without).cloned().collect::<Vec<Value>>(),
        "containers": [{"name": "c", "image": "i", "resources": {"requests": {"cpu": "3"}}, "ports": [{"hostPort": 80, "containerPort": 80}]}],
        "topologySpreadConstraints": [{"maxSkew": 1, "topologyKey": "node", "whenUnsatisfiable": "DoNotSchedule",
            "labelSelector": {"matchLabels": {"app": "web"}}}],
        "affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": shy}},
    });
    spec["nodeSelector"] = if without > 2 { json!(null) } else { json!({"disk": "ssd"}) };
    if without > 3 {
        spec["containers"][0]["ports"] = json!(null);
    }
    if without > 4 {
        spec["containers"][0]["resources"] = json!(null);
    }
    if without > 5 {
        spec["topologySpreadConstraints"] = json!(null);
    }
    if without > 6 {
        spec["affinity"] = json!(null);
    }
    let close = |node: &mut Node| {
        let spec = json!({"unschedulable": true, "taints": [{"key": "dedicated", "effect": "NoExecute"}]});
        node.spec = Some(serde_json::from_value(spec).expect("spec"));
        let allocatable = json!({"pods": "2", "cpu": "2"});
        node.status.as_mut().expect("status").allocatable = Some(serde_json::from_value(allocatable).expect("amounts"));
    };
    let holder = json!({"containers": [{"name": "c", "image": "i", "ports": [{"hostPort": 80, "containerPort": 80}]}]});
    let cluster = cases::ClusterBuilder::default().node("n", "node=n").with(close);
    // A domain without a pod, in which the pod does not fit either.
    let cluster = cluster
        .holds("n", cases::pod("", "app=web", holder))
        .node("other", "node=other")
        .with(close);
    (cluster, cases::pod("p", "app=web", spec))
}

/// The first filter that refuses a node is named.
#[test]
fn filters_have_the_order_of_the_default_profile() {
    let order = [
        "node(s) were unschedulable",
        "node(s) had untolerated taint(s)",
        "node(s) didn't match Pod's node affinity/selector",
        "node(s) didn't have free ports for the requested pod ports",
        "Insufficient cpu",
        "node(s) didn't match pod topology spread constraints",
        "node(s) didn't match pod anti-affinity rules",
        "",
    ];
    for (without, expected) in order.into_iter().enumerate() {
        let (cluster, pod) = troubled(without);
        let said = cluster.says(&pod);
        assert_eq!(said[0], ("n".to_owned(), expected.to_owned()), "{said:?}");
    }
}

#[test]
fn a_cordon_is_a_taint_that_can_be_tolerated() {
    let cordon = |node: &mut Node| node.spec = Some(serde_json::from_value(json!({"unschedulable": true})).expect("spec"));
    let cluster = cases::ClusterBuilder::default().node("n", "").with(cordon);
    for (toleration, expected) in [
        (json!({"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}), ""),
        (json!({"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}), ""),
        (json!({"operator": "Exists"}), ""),
        (
            json!({"key": "node.kubernetes.io/unschedulable", "operator": "Exists", "effect": "NoExecute"}),
            "node(s) were unschedulable",
        ),
        (json!({"key": "other", "operator": "Exists"}), "node(s) were unschedulable"),
    ] {
        let pod = cases::pod("p", "", json!({"tolerations": [toleration]}));
        cluster.check(&pod, &[expected], &toleration.to_string());
    }
}
