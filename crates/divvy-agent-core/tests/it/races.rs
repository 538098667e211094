//! The races of `docs/compatibility/races.md`, as far as the agent's decisions show them.

use divvy_agent_core::{DisagreementClass, PreStart, Reason, ResourceSpec};
use divvy_model::ContainerKind::App;
use divvy_model::{Allocation, Held, MiB};

use crate::node::{Node, key, pod, simple};

fn has(running: &crate::node::Running, device: &str) -> bool {
    running.devices.iter().any(|path| path == device)
}

#[test]
fn r5_a_pod_being_deleted_keeps_its_memory() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 3));
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("started");
    node.change("a", |pod| pod.deleting = true);
    node.see(simple("b", 0, 3));
    // The kubelet still holds a's ids, so b gets another set, whichever.
    node.kubelet_forgets("a");
    node.admit("b").expect("admitted");
    let (reason, text) = node.start("b", "main").expect_err("a runs");
    assert_eq!(reason, Reason::MemoryHeld);
    assert!(
        text.contains("memory is still held by default/pod-a (being deleted): 3072 MiB"),
        "{text}"
    );
    node.processes_end("a");
    node.object_gone("a");
    node.start("b", "main").expect("free now");
}

/// The pod's container holds the memory, even if the agent restarts meanwhile.
#[test]
fn r6_a_force_deleted_pod_holds_memory_over_a_restart() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 3));
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("started");
    node.object_gone("a");
    node.kubelet_forgets("a");
    node.restart_agent();
    node.see(simple("b", 0, 3));
    node.admit("b").expect("admitted");
    let (reason, text) = node.start("b", "main").expect_err("a's container runs");
    assert_eq!(reason, Reason::MemoryHeld);
    assert!(
        text.contains("default/pod-a (deleted, container still running): 3072 MiB"),
        "{text}"
    );
    let found = node.reconcile();
    assert_eq!(found.held["GPU-0"], MiB(3072));
    let gpu = &node.core.inventory().gpus[0];
    assert_eq!((gpu.held, gpu.held_by_pod), (MiB(3072), Some(false)));
    assert_eq!(found.classes[&DisagreementClass::HeldWithoutPod], 1);
    assert_eq!(
        node.events
            .iter()
            .filter(|(uid, reason, _)| uid == "a" && *reason == "MemoryHeldWithoutPod")
            .count(),
        1
    );
    node.reconcile();
    assert_eq!(node.events.len(), 1, "said once: {:?}", node.events);
    node.processes_end("a");
    node.start("b", "main")
        .expect("free now, without waiting for a reconciliation");
    node.reconcile();
    assert_eq!(node.core.inventory().gpus[0].held, MiB(0));
    assert!(!node.records.contains_key(&key("a", "main")));
}

#[test]
fn r15_an_unseen_pod_waits_and_is_never_mixed_up() {
    let mut node = Node::new(&[4096, 4096]);
    node.see(simple("b", 1, 3));
    let hidden = simple("a", 0, 3);
    let free = node.free_ids();
    let chosen = node.core.preferred(ResourceSpec::MEMORY, &free, &[], 3);
    node.allocate_as("a", "main", &chosen).expect("allocated");
    node.populated.insert("a".to_owned());
    let facts = node.facts();
    let ids = node.ids_of("a", "main");
    let answer = node.core.pre_start(ResourceSpec::MEMORY, &ids, &facts);
    assert!(
        matches!(&answer, PreStart::Wait(Reason::UnknownPod, text) if text.contains('a')),
        "{answer:?}"
    );
    // The list that the agent then requests contains the pod.
    node.pods.insert("a".to_owned(), hidden);
    assert!(has(&node.start("a", "main").expect("started"), "/dev/nvidia0"));
}

/// Case K10 of `docs/compatibility/kubelet.md`, and R17: a container that starts without PreStart finds its spec.
#[test]
fn r17_during_a_kubelet_restart_containers_need_no_pre_start() {
    let mut node = Node::new(&[4096]);
    node.see(pod("a", 0, &[("x", App, 1), ("y", App, 2)]));
    node.admit("a").expect("admitted");
    let before = node.start("a", "x").expect("started");
    node.restart_agent();
    node.reconcile();
    assert_eq!(node.resolve("a", "x"), Some(before));
    node.start("a", "y").expect("the container that was not started yet");
}

/// Case K23 of `docs/compatibility/kubelet.md`.
#[test]
fn r18_ids_handed_out_twice_give_nobody_memory_twice() {
    let mut node = Node::new(&[4096, 4096]);
    node.see(simple("a", 0, 3));
    node.admit("a").expect("admitted");
    let ids = node.ids_of("a", "main");
    node.start("a", "main").expect("started");
    node.see(simple("b", 1, 3));
    node.allocate_as("b", "main", &ids).expect("allocate cannot know");
    let (reason, text) = node.start("b", "main").expect_err("two pods, one set");
    assert_eq!(reason, Reason::DoubleHandout);
    assert!(text.contains("default/pod-a and default/pod-b"), "{text}");
    assert_eq!(node.reconcile().classes[&DisagreementClass::DoubleHandout], 1);
    // One of the pods ends, and the other starts on the GPU of its allocation.
    node.processes_end("a");
    node.object_gone("a");
    assert!(has(&node.start("b", "main").expect("no other owner now"), "/dev/nvidia1"));
    // a's grant ends, but its name belongs to b by now.
    node.reconcile();
    assert!(has(&node.resolve("b", "main").expect("kept"), "/dev/nvidia1"));
    assert_eq!(node.records.len(), 1);
}

#[test]
fn r18_ids_handed_out_twice_in_part_do_no_harm_and_are_counted() {
    let mut node = Node::new(&[4096, 4096]);
    let ids = |slots: &[u32]| slots.iter().map(|slot| format!("GPU-0::m{slot}")).collect::<Vec<_>>();
    node.see(simple("a", 0, 2));
    node.see(simple("b", 1, 2));
    node.allocate_as("a", "main", &ids(&[0, 1])).expect("allocated");
    node.allocate_as("b", "main", &ids(&[1, 2])).expect("allocated");
    node.start("a", "main").expect("started");
    let PreStart::Granted {
        shared_ids,
        steered_wrong,
        ..
    } = node.pre_start("b", "main")
    else {
        panic!("granted");
    };
    assert!(shared_ids && steered_wrong);
    assert!(has(&node.resolve("b", "main").expect("there"), "/dev/nvidia1"));
}

/// R21: the first value of the annotation counts.
#[test]
fn r21_a_changed_allocation_has_no_effect_and_is_said_once() {
    let mut node = Node::new(&[4096, 4096]);
    node.see(simple("a", 0, 1));
    let Held::Allocation(other) = simple("a", 1, 1).held else {
        panic!("an allocation");
    };
    let larger = Allocation {
        gpus: vec![divvy_model::GpuShare {
            memory: MiB(4096),
            ..other.gpus[0].clone()
        }],
        ..other.clone()
    };
    for held in [Held::Allocation(other.clone()), Held::Allocation(larger), Held::Nothing] {
        node.change("a", |pod| pod.held = held);
    }
    assert_eq!(
        node.events
            .iter()
            .filter(|(_, reason, _)| *reason == "AllocationChanged")
            .count(),
        1
    );
    node.admit("a").expect("admitted");
    assert!(has(&node.start("a", "main").expect("started"), "/dev/nvidia0"));
    // An agent that starts later trusts the record, not the annotation.
    node.change("a", |pod| pod.held = Held::Allocation(other));
    node.restart_agent();
    assert!(has(&node.start("a", "main").expect("started"), "/dev/nvidia0"));
    assert_eq!(
        node.events
            .iter()
            .filter(|(_, reason, _)| *reason == "AllocationChanged")
            .count(),
        2
    );
}

#[test]
fn a_pod_that_has_not_started_does_not_stand_in_anothers_way() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 3));
    node.admit("a").expect("admitted");
    node.see(simple("b", 0, 3));
    node.kubelet_forgets("a");
    node.admit("b").expect("admitted");
    node.start("b", "main").expect("only live grants count");
}

#[test]
fn no_record_is_made_for_a_container_whose_start_is_refused() {
    let mut node = Node::new(&[4096, 4096]);
    node.see(simple("a", 0, 3));
    node.admit("a").expect("admitted");
    let ids = node.ids_of("a", "main");
    node.start("a", "main").expect("started");
    // The container starts once more, and its container runtime has not read the spec yet when the pod's object is deleted.
    let before = node.resolve("a", "main");
    node.object_gone("a");
    node.kubelet_forgets("a");
    // The kubelet gives its ids to a pod on the other GPU, and one container of that pod runs without them.
    node.see(pod("b", 1, &[("x", App, 1), ("y", App, 3)]));
    let free: Vec<String> = node.free_ids().into_iter().filter(|id| !ids.contains(id)).take(1).collect();
    node.allocate_as("b", "x", &free).expect("allocated");
    node.allocate_as("b", "y", &ids).expect("allocated");
    node.start("b", "x").expect("started");
    let (reason, text) = node.start("b", "y").expect_err("a is on its way");
    assert_eq!(reason, Reason::DoubleHandout, "{text}");
    node.reconcile();
    // Both have the same grant name.
    assert_eq!(node.resolve("b", "y"), before, "the spec is still that of a");
    // a's container ends: b's grant is made when b starts.
    node.processes_end("a");
    node.reconcile();
    assert!(has(&node.start("b", "y").expect("no other owner now"), "/dev/nvidia1"));
}
