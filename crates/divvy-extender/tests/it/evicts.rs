//! Pods that a node's agent wants to be evicted.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_extender::core::{ExtenderAction, ExtenderCore, Posted};
use divvy_kube::watch::WatchChange;
use divvy_model::{Node, Phase, Pod, names};
use divvy_testbed::api::PatchKind;
use serde_json::json;

use crate::server::{Cluster, create_placed};
use crate::values::*;

const PAUSE_MS: u64 = 10_000;

/// A node whose agent names these pods.
fn naming(name: &str, evict: &[&str]) -> Node {
    let mut node = node(name, &[128]);
    if let Some(Ok(inventory)) = &mut node.inventory {
        inventory.evict = evict.iter().map(|name| format!("u-{name}")).collect();
    }
    node
}

/// Apply a node, and return the names of the pods that are evicted.
fn apply(core: &mut ExtenderCore, node: Node, ms: u64) -> BTreeSet<String> {
    evicted(core.node_change(WatchChange::Apply(node), at(ms)))
}

fn evicted(actions: Vec<ExtenderAction>) -> BTreeSet<String> {
    let name = |action| match action {
        ExtenderAction::Evict { uid, pod } => {
            assert_eq!(uid, format!("u-{}", pod.name));
            pod.name
        }
        other => panic!("{other:?}"),
    };
    actions.into_iter().map(name).collect()
}

fn named(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn placed(name: &str, node: &str) -> Pod {
    gpushare_pod(name, node, 0, 2)
}

#[test]
fn a_node_has_only_its_own_pods_with_gpus_evicted() {
    let deleting = Pod {
        deleting: true,
        ..placed("deleting", "n1")
    };
    let ended = Pod {
        phase: Phase::Succeeded,
        ..placed("ended", "n1")
    };
    let mut without = pod("without", 0);
    without.node = Some("n1".to_owned());
    without.request = divvy_model::PodRequest::default();
    let pods = [
        placed("a", "n1"),
        placed("other", "n2"),
        pod("waiting", 2),
        deleting,
        ended,
        without,
    ];
    let mut core = synced(&[naming("n1", &[]), naming("n2", &[])], &pods);
    let all = ["a", "other", "waiting", "deleting", "ended", "without", "unknown"];
    assert_eq!(apply(&mut core, naming("n1", &all), 1), named(&["a"]));
    // The list of nodes says the same as the watch.
    let mut core = synced(&[], &pods);
    let listed = core.node_change(WatchChange::Reset(vec![naming("n1", &all), naming("n2", &[])]), at(1));
    assert_eq!(evicted(listed), named(&["a"]));
}

/// The extender repeats the request as long as the node names the pod.
#[test]
fn an_eviction_is_requested_again_after_a_while() {
    let mut core = synced(&[naming("n1", &[])], &[placed("a", "n1"), placed("b", "n1")]);
    assert_eq!(apply(&mut core, naming("n1", &["a"]), 1), named(&["a"]));
    assert_eq!(core.evicted("u-a", lost()), []);
    assert_eq!(
        apply(&mut core, naming("n1", &["a", "b"]), 2),
        named(&["b"]),
        "a was asked for just before"
    );
    assert_eq!(evicted(core.sweep(at(PAUSE_MS))), named(&[]));
    assert_eq!(evicted(core.sweep(at(PAUSE_MS + 1))), named(&["a"]));
    // It is being deleted.
    assert_eq!(core.evicted("u-a", Posted::Created), []);
    core.index_mut().apply_pod(Pod {
        deleting: true,
        ..placed("a", "n1")
    });
    assert_eq!(
        apply(&mut core, naming("n1", &["a"]), 5 * PAUSE_MS),
        named(&[]),
        "b is not named any more"
    );
    let counts = core.counts();
    assert_eq!(
        (counts.evicted, counts.evictions_refused, counts.evictions_unknown),
        (1, 0, 1)
    );
}

#[test]
fn only_the_leader_evicts() {
    let mut core = synced(&[naming("n1", &[])], &[placed("a", "n1")]);
    core.stand_by();
    assert_eq!(apply(&mut core, naming("n1", &["a"]), 1), named(&[]));
    assert!(core.elected());
    core.await_list();
    assert_eq!(evicted(core.sweep(at(2))), named(&[]), "it does not lead yet");
    core.pods_listed(at(3));
    assert_eq!(evicted(core.sweep(at(4))), named(&["a"]));
}

/// The owner hears why it was refused.
#[test]
fn an_owner_hears_of_a_refused_eviction_once() {
    let mut core = synced(&[naming("n1", &[])], &[placed("a", "n1")]);
    apply(&mut core, naming("n1", &["a"]), 1);
    let refused = |text: &str| Posted::Refused(text.to_owned());
    let answer = refused("pods \"a\" is forbidden: cannot create resource \"pods/eviction\" (403 Forbidden)");
    let actions = core.evicted("u-a", answer.clone());
    let [ExtenderAction::Warn { pod, reason, text, .. }] = &actions[..] else {
        panic!("{actions:?}");
    };
    assert_eq!((&*pod.name, *reason), ("a", "EvictionRefused"));
    assert!(
        text.contains("pods/eviction")
            && text.ends_with("Install Divvy's chart with agent.onEscape=evict, which gives the extender this right"),
        "{text}"
    );
    assert_eq!(core.evicted("u-a", answer), []);
    // The sign has ended and comes again.
    apply(&mut core, naming("n1", &[]), 2);
    apply(&mut core, naming("n1", &["a"]), 3);
    let actions = core.evicted(
        "u-a",
        refused("Cannot evict pod as it would violate the pod's disruption budget. (429 TooManyRequests)"),
    );
    assert!(
        matches!(&actions[..], [ExtenderAction::Warn { text, .. }] if text.contains("disruption budget") && text.ends_with("every 10 s")),
        "{actions:?}"
    );
    assert_eq!(core.counts().evictions_refused, 3);
}

#[test]
fn what_one_node_names_does_not_flood_the_api_server() {
    let names: Vec<String> = (0..40).map(|number| format!("p{number:02}")).collect();
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let pods: Vec<Pod> = names.iter().map(|name| placed(name, "n1")).collect();
    let mut core = synced(&[naming("n1", &[])], &pods);
    let first = apply(&mut core, naming("n1", &names), 1);
    assert_eq!(first.len(), 16);
    let second = evicted(core.sweep(at(2)));
    assert_eq!((second.len(), first.intersection(&second).count()), (16, 0));
}

#[tokio::test]
async fn the_pod_is_evicted_through_the_api_server() {
    let cluster = Cluster::fixture().await;
    let inventory = |evict: &[String]| {
        let text = match naming("n1", &[]).inventory {
            Some(Ok(mut inventory)) => {
                inventory.evict = evict.iter().cloned().collect();
                inventory.to_json()
            }
            other => panic!("{other:?}"),
        };
        json!({"metadata": {"annotations": {names::INVENTORY: text}}})
    };
    create_placed(&cluster.api, "greedy", "n1", 0, 2);
    let uid = |name: &str| {
        let pod = cluster.api.get("pods", "default", name).ok()?;
        Some(pod["metadata"]["uid"].as_str()?.to_owned())
    };
    let (greedy, elsewhere) = (uid("greedy").expect("there"), uid("c").expect("there"));
    cluster
        .eventually("/metrics", |_, text| text.contains("divvy_ledger_pods 4"))
        .await;
    cluster
        .api
        .patch("nodes", "", "n1", PatchKind::Merge, &inventory(&[greedy, elsewhere]))
        .expect("patched");
    let evicted = cluster
        .eventually("/metrics", |_, text| {
            text.contains(r#"divvy_extender_evictions_total{outcome="evicted"} 1"#)
        })
        .await;
    assert!(evicted.contains(r#"outcome="refused"} 0"#), "{evicted}");
    let gone = || match cluster.api.get("pods", "default", "greedy") {
        Ok(pod) => !pod["metadata"]["deletionTimestamp"].is_null(),
        Err(_) => true,
    };
    assert!(gone());
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(uid("c").is_some(), "a pod of another node");
}
