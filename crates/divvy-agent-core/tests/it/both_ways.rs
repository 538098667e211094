//! GPUs that are offered in both ways: their memory is shared, and each can be had as a whole.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use divvy_agent_core::{CoreSettings, DisagreementClass, Reason, ResourceSpec};
use divvy_model::ContainerKind::App;
use divvy_model::{Health, Held, MiB, Phase, Pod, Vendor, WholeKind, names};

use crate::node::{GIB, Node, gpu, gpus_of, holding, key, settings, simple};
use crate::whole::plain_of;

pub(crate) const WHOLE: ResourceSpec = ResourceSpec::whole(WholeKind::Gpu(Vendor::Nvidia));

pub(crate) fn both() -> CoreSettings {
    CoreSettings {
        whole: true,
        ..settings()
    }
}

/// A node with GPUs of 4 units.
pub(crate) fn node(gpus: u32) -> Node {
    Node::with(both(), (0..gpus).map(|index| gpu(index, 4 * GIB)).collect())
}

pub(crate) fn uuid(index: u32) -> String {
    format!("GPU-{index}")
}

/// A pod that kube-scheduler bound without the extender: it has no allocation.
pub(crate) fn plain(uid: &str, gpus: u64) -> Pod {
    plain_of(Vendor::Nvidia, uid, &[("main", App, gpus)])
}

/// A pod that has these GPUs by the extender's decision.
pub(crate) fn placed(uid: &str, gpus: &[u32]) -> Pod {
    let uuids: Vec<String> = gpus.iter().map(|index| uuid(*index)).collect();
    holding(plain(uid, gpus.len() as u64), &uuids, MiB(4 * GIB))
}

#[test]
fn a_node_offers_its_gpus_in_both_ways_if_the_operator_says_so() {
    let offered = |settings: CoreSettings| -> Vec<Cow<'static, str>> {
        let node = Node::with(settings, vec![gpu(0, 4 * GIB)]);
        node.core.offers().into_iter().map(ResourceSpec::name).collect()
    };
    assert_eq!(offered(settings()), [names::GPU_MEM, names::GPU_COUNT]);
    assert_eq!(offered(both()), [names::GPU_MEM, names::GPU_COUNT, "nvidia.com/gpu"]);
    let ids: Vec<String> = node(2).core.devices(WHOLE).into_iter().map(|device| device.id).collect();
    assert_eq!(ids, ["GPU-0", "GPU-1"], "the ids of NVIDIA's device plugin");
    assert_eq!(node(2).core.inventory().total_units(), 8);
}

#[test]
fn a_whole_gpu_comes_without_variables_for_shares() {
    let mut node = node(2);
    node.see(placed("a", &[1]));
    node.allocate_of(WHOLE, "a", "main", &[uuid(0)]).expect("allocated");
    let running = node.start("a", "main").expect("started");
    assert_eq!(gpus_of(&node, "a", "main"), [uuid(1)], "the allocation counts");
    assert_eq!(running.env, ["NVIDIA_VISIBLE_DEVICES=void"]);
    assert!(running.devices.contains(&"/dev/nvidia1".to_owned()), "{running:?}");
    assert!(!running.devices.contains(&"/dev/nvidia0".to_owned()), "{running:?}");
}

#[test]
fn a_share_and_a_whole_gpu_wait_for_each_other() {
    let mut node = node(1);
    node.see(simple("share", 0, 1));
    node.admit("share").expect("admitted");
    node.start("share", "main").expect("started");
    node.see(placed("whole", &[0]));
    node.allocate_of(WHOLE, "whole", "main", &[uuid(0)]).expect("allocated");
    let (reason, text) = node.start("whole", "main").expect_err("the share is there");
    assert_eq!(reason, Reason::MemoryHeld);
    assert_eq!(
        text,
        "pod default/pod-whole needs 4096 MiB of GPU 0, where 3072 MiB of 4096 MiB are free; memory is still held by default/pod-share: 1024 \
         MiB. The container starts automatically once they have ended"
    );
    node.change("share", |pod| pod.phase = Phase::Succeeded);
    node.processes_end("share");
    node.reconcile();
    node.start("whole", "main").expect("started");
    node.see(simple("late", 0, 1));
    node.admit("late").expect("admitted");
    let (reason, text) = node.start("late", "main").expect_err("the GPU is taken as a whole");
    assert_eq!(reason, Reason::MemoryHeld);
    assert!(text.contains("held by default/pod-whole: 4096 MiB"), "{text}");
}

#[test]
fn without_an_allocation_a_container_gets_an_unused_gpu() {
    let mut node = node(2);
    node.see(simple("share", 0, 1));
    node.admit("share").expect("admitted");
    node.start("share", "main").expect("started");
    let preferred = node.core.preferred(WHOLE, &[uuid(0), uuid(1)], &[], 1);
    assert_eq!(preferred, [uuid(1)]);
    node.see(plain("whole", 1));
    node.allocate_of(WHOLE, "whole", "main", &[uuid(0)]).expect("allocated");
    node.start("whole", "main").expect("started");
    assert_eq!(gpus_of(&node, "whole", "main"), [uuid(1)]);
    let found = node.reconcile();
    assert_eq!(
        found.held,
        BTreeMap::from([(uuid(1), MiB(4 * GIB))]),
        "the inventory shows which GPU it has"
    );
    node.see(plain("more", 1));
    node.allocate_of(WHOLE, "more", "main", &[uuid(1)]).expect("allocated");
    let (reason, text) = node.start("more", "main").expect_err("no GPU is free");
    assert_eq!(reason, Reason::MemoryHeld);
    assert!(
        text.contains("only 0 of this node's GPUs are healthy and not in use by another pod."),
        "{text}"
    );
}

/// A client without the extender writes an allocation of a few MiB for a pod that requests a whole GPU.
#[test]
fn a_pod_that_requests_whole_gpus_is_refused_a_part() {
    let mut node = node(1);
    let mut forged = placed("forged", &[0]);
    if let Held::Allocation(allocation) = &mut forged.held {
        (allocation.gpus[0].memory, allocation.gpus[0].whole) = (MiB(1), false);
    }
    node.see(forged);
    node.allocate_of(WHOLE, "forged", "main", &[uuid(0)]).expect("allocated");
    let (reason, text) = node.start("forged", "main").expect_err("it is forged");
    assert_eq!(reason, Reason::NoAllocation);
    assert!(
        text.contains("gives it only 1 MiB of GPU GPU-0, but the pod requests whole GPUs"),
        "{text}"
    );
}

/// For each resource, kube-scheduler computes "healthy − requested". The result must be what is free on the other GPUs.
/// The ids stay healthy only in the resource through which the GPU is held.
#[test]
fn a_failed_gpus_ids_stay_healthy_in_the_held_resource() {
    let healthy = |node: &Node| {
        let count = |spec| node.core.devices(spec).iter().filter(|device| device.healthy).count();
        (count(ResourceSpec::MEMORY), count(WHOLE))
    };
    let mut whole = node(2);
    whole.see(placed("a", &[0]));
    whole.set_health(0, Health::Failed, Some("XID 79"));
    assert_eq!(healthy(&whole), (4, 2));
    let mut shared = node(2);
    shared.see(simple("a", 0, 3));
    shared.set_health(0, Health::Failed, Some("XID 79"));
    assert_eq!(healthy(&shared), (7, 1));
}

/// NVIDIA's device plugin gave a running pod its GPU, and Divvy's agent takes over the node.
#[test]
fn a_running_pod_keeps_the_gpu_of_another_plugin() {
    let mut node = node(2);
    let mut running = plain("theirs", 1);
    (running.phase, running.container_running) = (Phase::Running, true);
    node.see(running);
    node.populated.insert("theirs".to_owned());
    node.handouts.push(divvy_agent_core::Handout {
        key: key("theirs", "main"),
        resource: "nvidia.com/gpu".to_owned(),
        ids: BTreeSet::from([uuid(1)]),
        grant: None,
    });
    let found = node.reconcile();
    assert_eq!(found.held, BTreeMap::from([(uuid(1), MiB(4 * GIB))]));
    assert_eq!(gpus_of(&node, "theirs", "main"), [uuid(1)]);
    assert_eq!(node.specs.len(), 0, "the container does not need a grant");
    node.see(simple("ours", 1, 1));
    node.admit("ours").expect("admitted");
    let (reason, _) = node.start("ours", "main").expect_err("the GPU is in use");
    assert_eq!(reason, Reason::MemoryHeld);
}

/// While NVIDIA's plugin runs on the same node, the kubelet may call it instead.
#[test]
fn gpus_given_by_another_plugin_are_reported() {
    let theirs = |uid: &str, index: u32| divvy_agent_core::Handout {
        key: key(uid, "main"),
        resource: "nvidia.com/gpu".to_owned(),
        ids: BTreeSet::from([uuid(index)]),
        grant: None,
    };
    let mut node = node(2);
    node.see(plain("before", 1));
    node.handouts.push(theirs("before", 0));
    assert_eq!(
        node.reconcile().classes.get(&DisagreementClass::AnotherPlugin),
        None,
        "the agent took over the node"
    );
    node.see(plain("after", 1));
    node.handouts.push(theirs("after", 1));
    let found = node.reconcile();
    assert_eq!(found.classes.get(&DisagreementClass::AnotherPlugin), Some(&1));
    let (uid, reason, text) = node.events.last().expect("an event");
    assert_eq!((uid.as_str(), *reason), ("after", "TwoDevicePlugins"));
    assert!(
        text.starts_with("another device plugin gave container main its nvidia.com/gpu"),
        "{text}"
    );
    assert_eq!(found.held.len(), 2, "both GPUs are in use: {:?}", found.held);
    assert_eq!(found.held_by_pods, BTreeSet::from([uuid(0), uuid(1)]));
}
