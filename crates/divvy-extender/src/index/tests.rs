use std::collections::BTreeMap;

use divvy_model::{Held, MiB};
use proptest::prelude::*;
use serde_json::json;

use super::*;

fn pod_object(name: u8, generation: u8, node: Option<u8>, index: u32, units: u64, phase: &str) -> PodObject {
    let mut value = json!({
        "metadata": {"name": format!("p{name}"), "namespace": "ns", "uid": format!("u{name}-{generation}"), "annotations": {}},
        "spec": {"containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": units.to_string(), "cpu": "100m"}}}]},
        "status": {"phase": phase}
    });
    if let Some(node) = node {
        value["spec"]["nodeName"] = json!(format!("n{node}"));
        value["metadata"]["annotations"] =
            json!({"ALIYUN_COM_GPU_MEM_IDX": index.to_string(), "ALIYUN_COM_GPU_MEM_POD": units.to_string()});
    }
    serde_json::from_value(value).expect("a pod")
}

fn node_object(name: u8, gpus: u64, units_each: u64) -> NodeObject {
    serde_json::from_value(json!({
        "metadata": {"name": format!("n{name}"), "uid": format!("un{name}")},
        "spec": {},
        "status": {"capacity": {"aliyun.com/gpu-mem": (gpus * units_each).to_string(), "aliyun.com/gpu-count": gpus.to_string()}}
    }))
    .expect("a node")
}

/// All state on which decisions depend.
fn picture(index: &Index) -> BTreeMap<String, Vec<(MiB, Vec<String>)>> {
    index
        .ledger()
        .nodes()
        .map(|view| {
            let gpus = view.state().map_or(0, |state| state.gpus.len());
            let free = (0..gpus)
                .map(|i| (view.free(i), view.holders(i).iter().map(ToString::to_string).collect()))
                .collect();
            (format!("{} {:?}", view.name(), view.requested()), free)
        })
        .collect()
}

#[derive(Debug, Clone)]
enum Step {
    Pod(u8, u8, Option<u8>, u32, u64, usize),
    DeletePod(u8),
    Node(u8, u64, u64),
    DeleteNode(u8),
    Relist,
    Cut,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..5u8, 0..2u8, proptest::option::of(0..3u8), 0..3u32, 0..9u64, 0..3usize)
            .prop_map(|(a, b, c, d, e, f)| Step::Pod(a, b, c, d, e, f)),
        2 => (0..5u8).prop_map(Step::DeletePod),
        2 => (0..3u8, 0..3u64, 0..17u64).prop_map(|(a, b, c)| Step::Node(a, b, c)),
        1 => (0..3u8).prop_map(Step::DeleteNode),
        1 => Just(Step::Relist),
        2 => Just(Step::Cut),
    ];
    proptest::collection::vec(step, 1..50)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(384))]

    /// While the watch is cut, changes are lost; the list that ends the cut corrects everything.
    #[test]
    fn any_interleaving_ends_in_the_final_objects_state(steps in steps()) {
        let mut pods: BTreeMap<String, PodObject> = BTreeMap::new();
        let mut nodes: BTreeMap<String, NodeObject> = BTreeMap::new();
        let mut index = Index::new(MemoryUnit::GIB);
        let mut cut = false;
        for step in steps {
            match step {
                Step::Pod(name, generation, node, gpu, units, phase) => {
                    let phase = ["Pending", "Running", "Succeeded"][phase];
                    let object = pod_object(name, generation, node, gpu, units, phase);
                    // The earlier pod of the same name is deleted first, as in an API server.
                    let same = format!("p{name}");
                    if let Some(old) = pods.get(&same).filter(|old| old.metadata.uid != object.metadata.uid).cloned() {
                        pods.remove(&same);
                        if !cut { index.pod_change(WatchChange::Delete(old)); }
                    }
                    pods.insert(same, object.clone());
                    if !cut { index.pod_change(WatchChange::Apply(object)); }
                }
                Step::DeletePod(name) => {
                    if let Some(old) = pods.remove(&format!("p{name}")) && !cut {
                        index.pod_change(WatchChange::Delete(old));
                    }
                }
                Step::Node(name, gpus, units) => {
                    let object = node_object(name, gpus, units);
                    nodes.insert(format!("n{name}"), object.clone());
                    if !cut { index.node_change(WatchChange::Apply(object)); }
                }
                Step::DeleteNode(name) => {
                    if let Some(old) = nodes.remove(&format!("n{name}")) && !cut {
                        index.node_change(WatchChange::Delete(old));
                    }
                }
                Step::Cut => {
                    cut = true;
                    index.pod_change(WatchChange::Interrupted("cut".to_owned()));
                }
                Step::Relist => {
                    cut = false;
                    index.pod_change(WatchChange::Reset(pods.values().cloned().collect()));
                    index.node_change(WatchChange::Reset(nodes.values().cloned().collect()));
                }
            }
            if !cut {
                let mut fresh = Index::new(MemoryUnit::GIB);
                fresh.pod_change(WatchChange::Reset(pods.values().cloned().collect()));
                fresh.node_change(WatchChange::Reset(nodes.values().cloned().collect()));
                prop_assert_eq!(picture(&index), picture(&fresh));
                prop_assert_eq!(index.ledger().anomalies(), fresh.ledger().anomalies());
            }
        }
    }
}

#[test]
fn it_is_synced_when_both_were_listed_once() {
    let mut index = Index::new(MemoryUnit::GIB);
    index.pod_change(WatchChange::Apply(pod_object(0, 0, None, 0, 1, "Pending")));
    assert!(!index.synced());
    index.pod_change(WatchChange::Reset(Vec::new()));
    assert!(!index.synced());
    index.node_change(WatchChange::Reset(Vec::new()));
    assert!(index.synced());
    index.pod_change(WatchChange::Interrupted("gone".to_owned()));
    assert!(index.synced(), "a watch that broke is taken up again; what is known stays");
    let feed = index.pods();
    assert_eq!(
        (feed.lists, feed.interruptions, feed.trouble.as_deref()),
        (1, 1, Some("gone"))
    );
    index.node_change(WatchChange::Interrupted("gone".to_owned()));
    index.pod_change(WatchChange::Resumed);
    assert_eq!((&index.pods().trouble, index.nodes().trouble.is_some()), (&None, true));
    index.node_change(WatchChange::Reset(Vec::new()));
    assert_eq!(index.nodes().trouble, None);
}

#[test]
fn a_pod_whose_requests_cannot_be_read_still_holds_its_memory() {
    let mut index = Index::new(MemoryUnit::GIB);
    index.node_change(WatchChange::Apply(node_object(0, 1, 16)));
    let mut object = pod_object(0, 0, Some(0), 0, 10, "Running");
    object.spec.containers[0]
        .resources
        .limits
        .insert("cpu", divvy_kube::objects::QuantityText("much".to_owned()));
    index.pod_change(WatchChange::Apply(object.clone()));
    let view = index.ledger().node("n0").expect("known");
    assert_eq!(view.free(0), MiB(6 * 1024));
    assert_eq!(index.unreadable().count(), 1);
    assert!(matches!(index.ledger().pod("u0-0").expect("known").held, Held::Legacy(_)));
    index.pod_change(WatchChange::Delete(object));
    assert_eq!(index.unreadable().count(), 0);
    assert_eq!(index.ledger().node("n0").expect("known").free(0), MiB(16 * 1024));
}

#[test]
fn remembered_unreadable_pod_requests_are_bounded() {
    let mut index = Index::new(MemoryUnit::GIB);
    let unreadable = |number: usize| {
        let mut object = pod_object(0, 0, None, 0, 10, "Pending");
        object.metadata.uid = Some(format!("u{number}"));
        object.metadata.name = Some(format!("p{number}"));
        let limits = &mut object.spec.containers[0].resources.limits;
        limits.insert("cpu", divvy_kube::objects::QuantityText("much".to_owned()));
        object
    };
    index.pod_change(WatchChange::Reset((0..MOST_UNREADABLE + 500).map(unreadable).collect()));
    assert_eq!(index.unreadable().count(), MOST_UNREADABLE);
    index.pod_change(WatchChange::Delete(unreadable(0)));
    index.pod_change(WatchChange::Apply(unreadable(MOST_UNREADABLE)));
    assert_eq!(index.unreadable().count(), MOST_UNREADABLE);
}
