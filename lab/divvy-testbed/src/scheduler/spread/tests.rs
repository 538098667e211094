//! Cases of upstream's `plugins/podtopologyspread/filtering_test.go`, with upstream's names where they have one.

use serde_json::{Value, json};

use super::super::cases::{ClusterBuilder, pod};
use super::super::{node_affinity, taints};
use super::*;

const FITS: &str = "";

fn constraint(max_skew: i32, key: &str, more: Value) -> Value {
    let selector = json!({"matchExpressions": [{"key": "foo", "operator": "Exists"}]});
    let mut whole =
        json!({"maxSkew": max_skew, "topologyKey": key, "whenUnsatisfiable": "DoNotSchedule", "labelSelector": selector});
    for (field, value) in more.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    whole
}

fn spread(constraints: &[Value]) -> k8s_openapi::api::core::v1::Pod {
    pod("p", "foo", json!({"topologySpreadConstraints": constraints}))
}

/// Return two zones of two nodes each, with these numbers of pods `foo` on the nodes.
fn zones(counts: [usize; 4]) -> ClusterBuilder {
    let nodes = [
        ("node-a", "zone1"),
        ("node-b", "zone1"),
        ("node-x", "zone2"),
        ("node-y", "zone2"),
    ];
    let mut cluster = ClusterBuilder::default();
    for ((node, zone), count) in nodes.into_iter().zip(counts) {
        cluster = cluster.node(node, &format!("zone={zone},node={node}"));
        for _ in 0..count {
            cluster = cluster.has(node, "foo");
        }
    }
    cluster
}

#[test]
fn a_domain_may_have_so_many_more_than_the_one_with_the_fewest() {
    let zone = |skew| constraint(skew, "zone", json!(null));
    let node = |skew| constraint(skew, "node", json!(null));
    for (case, counts, constraints, expected) in [
        ("no existing pods", [0, 0, 0, 0], vec![zone(1)], [FITS; 4]),
        ("3/3, all nodes fit", [2, 1, 0, 3], vec![zone(1)], [FITS; 4]),
        ("3/4", [2, 1, 1, 3], vec![zone(1)], [FITS, FITS, SKEW, SKEW]),
        (
            "2/1/0/3, only node-x fits",
            [2, 1, 0, 3],
            vec![node(1)],
            [SKEW, SKEW, FITS, SKEW],
        ),
        (
            "2/1/0/3, maxSkew is 2, node-b and node-x fit",
            [2, 1, 0, 3],
            vec![node(2)],
            [SKEW, FITS, FITS, SKEW],
        ),
        (
            "two constraints, [3/3, 2/1/0/3]",
            [2, 1, 0, 3],
            vec![zone(1), node(1)],
            [SKEW, SKEW, FITS, SKEW],
        ),
        (
            "two constraints, [3/4, 2/1/0/4]",
            [2, 1, 0, 4],
            vec![zone(1), node(1)],
            [SKEW; 4],
        ),
        (
            "no node has the label",
            [0; 4],
            vec![constraint(1, "rack", json!(null))],
            [NO_LABEL; 4],
        ),
        (
            "only scores",
            [2, 0, 0, 0],
            vec![constraint(1, "node", json!({"whenUnsatisfiable": "ScheduleAnyway"}))],
            [FITS; 4],
        ),
        (
            "the absent selector matches no pod",
            [2, 0, 0, 0],
            vec![constraint(1, "node", json!({"labelSelector": null}))],
            [FITS; 4],
        ),
        (
            "the empty selector matches all",
            [2, 0, 0, 0],
            vec![constraint(1, "node", json!({"labelSelector": {}}))],
            [SKEW, FITS, FITS, FITS],
        ),
    ] {
        zones(counts).check(&spread(&constraints), &expected, case);
    }
}

#[test]
fn a_pod_that_does_not_match_its_own_selector_adds_nothing() {
    let mut stranger = spread(&[constraint(1, "node", json!(null))]);
    zones([2, 1, 0, 3]).check(&stranger, &[SKEW, SKEW, FITS, SKEW], "it matches");
    stranger.metadata.labels = None;
    zones([2, 1, 0, 3]).check(&stranger, &[SKEW, FITS, FITS, SKEW], "it does not");
}

/// Such a node counts for none of the constraints.
#[test]
fn a_node_without_topology_key_gets_no_pod() {
    let rack = |cluster: ClusterBuilder| {
        cluster
            .node("node-a", "zone=z1,rack=r1")
            .node("node-b", "zone=z2,rack=r1")
            .node("node-c", "rack=r2")
    };
    let cluster = rack(ClusterBuilder::default()).has("node-a", "foo").has("node-c", "foo");
    let (zone, rack) = (constraint(1, "zone", json!(null)), constraint(1, "rack", json!(null)));
    cluster.check(&spread(std::slice::from_ref(&zone)), &[SKEW, FITS, NO_LABEL], "zones");
    cluster.check(&spread(std::slice::from_ref(&rack)), &[FITS, FITS, FITS], "racks as 1/1");
    // With both constraints, node-c's rack does not count. Otherwise its pod would count, and 1/1 would allow another pod on node-b.
    let two = cluster.has("node-b", "foo");
    two.check(&spread(&[zone, rack]), &[FITS, FITS, NO_LABEL], "racks as 2 and no others");
}

/// The pod that is being placed does not count either.
#[test]
fn other_namespaces_and_deleted_pods_do_not_count() {
    let nodes = || ClusterBuilder::default().node("node-a", "node=a").node("node-b", "node=b");
    let one = constraint(1, "node", json!(null));
    let mut other = pod("", "foo", json!({}));
    other.metadata.namespace = Some("elsewhere".to_owned());
    let mut ending = pod("", "foo", json!({}));
    ending.metadata.deletion_timestamp = Some(serde_json::from_value(json!("2026-11-01T10:00:00Z")).expect("time"));
    let mut ended = pod("", "foo", json!({}));
    ended.status = Some(serde_json::from_value(json!({"phase": "Succeeded"})).expect("status"));
    nodes()
        .has("node-a", "foo")
        .check(&spread(std::slice::from_ref(&one)), &[SKEW, FITS], "one that counts");
    for (case, ignored) in [
        ("another namespace", other),
        ("terminating Pods should be excluded", ending),
        ("ended", ended),
    ] {
        let cluster = nodes().holds("node-a", ignored).has("node-b", "foo");
        cluster.check(&spread(std::slice::from_ref(&one)), &[FITS, SKEW], case);
    }
    let mut cluster = nodes().has("node-a", "foo");
    let mut own = spread(&[one]);
    own.metadata.uid = Some("bound-0".to_owned());
    cluster.check(&own, &[FITS, FITS], "itself");
    cluster.bound[0].spec.as_mut().expect("spec").node_name = Some("gone".to_owned());
    own.metadata.uid = None;
    cluster.check(&own, &[FITS, FITS], "on a node that is not there");
}

#[test]
fn with_fewer_domains_than_min_domains_the_fewest_are_none() {
    let nodes = || {
        ClusterBuilder::default()
            .node("node-a", "node=a")
            .node("node-b", "node=b")
            .node("node-c", "node=c")
    };
    let cluster = nodes()
        .has("node-a", "foo")
        .has("node-a", "foo")
        .has("node-b", "foo")
        .has("node-b", "foo")
        .has("node-c", "foo");
    for (case, more, expected) in [
        (
            "2/2/1, maxSkew is 2, domains < minDomains, the third fits",
            json!({"minDomains": 4}),
            [SKEW, SKEW, FITS],
        ),
        ("domains > minDomains, all fit", json!({"minDomains": 2}), [FITS; 3]),
        ("as many", json!({"minDomains": 3}), [FITS; 3]),
        ("not set", json!(null), [FITS; 3]),
    ] {
        cluster.check(&spread(&[constraint(2, "node", more)]), &expected, case);
    }
}

/// Such nodes count only if the constraint ignores the node affinity.
#[test]
fn nodes_outside_the_node_affinity_do_not_count() {
    let affinity = json!({"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "node", "operator": "In", "values": ["node-a", "node-y"]}]}]}}});
    let away = node_affinity::MISMATCH;
    for (policy, expected) in [
        (json!(null), [FITS, away, away, SKEW]),
        (json!({"nodeAffinityPolicy": "Honor"}), [FITS, away, away, SKEW]),
        (json!({"nodeAffinityPolicy": "Ignore"}), [SKEW, away, away, SKEW]),
    ] {
        let mut pod = spread(&[constraint(1, "node", policy.clone())]);
        pod.spec.as_mut().expect("spec").affinity = Some(serde_json::from_value(affinity.clone()).expect("affinity"));
        zones([2, 1, 0, 3]).check(&pod, &expected, &policy.to_string());
    }
    let mut selecting = spread(&[constraint(1, "node", json!(null))]);
    selecting.spec.as_mut().expect("spec").node_selector = Some(crate::scheduler::cases::labels("zone=zone1"));
    zones([2, 1, 0, 3]).check(&selecting, &[SKEW, FITS, away, away], "nodeSelector");
}

#[test]
fn only_honored_untolerated_taints_exclude_a_node() {
    let tainted = |node: &mut k8s_openapi::api::core::v1::Node| {
        node.spec = Some(serde_json::from_value(json!({"taints": [{"key": "foo", "effect": "NoSchedule"}]})).expect("spec"));
    };
    let cordoned = |node: &mut k8s_openapi::api::core::v1::Node| {
        node.spec = Some(serde_json::from_value(json!({"unschedulable": true})).expect("spec"));
    };
    let nodes = || {
        ClusterBuilder::default()
            .node("node-a", "node=a")
            .has("node-a", "foo")
            .node("node-b", "node=b")
    };
    let mut cluster = nodes().with(tainted);
    let honor = json!({"nodeTaintsPolicy": "Honor"});
    for (policy, expected) in [
        (json!(null), [SKEW, taints::UNTOLERATED]),
        (json!({"nodeTaintsPolicy": "Ignore"}), [SKEW, taints::UNTOLERATED]),
        (honor.clone(), [FITS, taints::UNTOLERATED]),
    ] {
        cluster.check(
            &spread(&[constraint(1, "node", policy.clone())]),
            &expected,
            &policy.to_string(),
        );
    }
    let mut tolerant = spread(&[constraint(1, "node", honor.clone())]);
    tolerant.spec.as_mut().expect("spec").tolerations =
        Some(serde_json::from_value(json!([{"operator": "Exists"}])).expect("tolerations"));
    cluster.check(&tolerant, &[SKEW, FITS], "tolerated");
    cluster = nodes().with(cordoned);
    cluster.check(
        &spread(&[constraint(1, "node", honor)]),
        &[FITS, taints::UNSCHEDULABLE],
        "cordoned",
    );
}

#[test]
fn match_label_keys_count_only_equal_values() {
    let more = json!({"matchLabelKeys": ["hash", "absent"]});
    let mut pod = spread(&[constraint(1, "node", more)]);
    pod.metadata.labels = Some(crate::scheduler::cases::labels("foo,hash=2"));
    let cluster = zones([0; 4])
        .has("node-a", "foo,hash=1")
        .has("node-b", "foo,hash=2")
        .has("node-x", "hash=2");
    cluster.check(&pod, &[FITS, SKEW, FITS, FITS], "hash");
}
