//! GetPreferredAllocation, Allocate, and PreStartContainer, one at a time.

use std::collections::BTreeSet;
use std::sync::Arc;

use divvy_agent_core::{
    AgentAction, CoreSettings, DecisionFacts, Guard, Guarded, NOT_LIMITED, PreStart, Reaction, Reason, ResourceSpec,
};
use divvy_cdi::CdiMount;
use divvy_model::ContainerKind::{App, Init, Sidecar};
use divvy_model::{ContainerKind, Enforcement, GpuRules, Health, Held, Isolation, MiB, Pod, names};
use proptest::prelude::*;

use crate::node::{Limits, Node, gpu, key, pod, settings, simple};

fn ids(texts: &[&str]) -> Vec<String> {
    texts.iter().map(|text| (*text).to_owned()).collect()
}

#[test]
fn the_answer_has_the_size_asked_for_and_what_must_be_included() {
    let mut node = Node::new(&[4096, 4096]);
    let all = node.free_ids();
    for (available, must, size, expected) in [
        // No pod is waiting: the ids of one GPU.
        (all.clone(), ids(&[]), 2, ids(&["GPU-0::m0", "GPU-0::m1"])),
        // must_include decides the GPU.
        (all.clone(), ids(&["GPU-1::m3"]), 2, ids(&["GPU-1::m3", "GPU-1::m0"])),
        (all.clone(), ids(&["GPU-1::m3"]), 1, ids(&["GPU-1::m3"])),
        // Gaps: the GPU on which everything fits comes first.
        (
            ids(&["GPU-0::m2", "GPU-1::m0", "GPU-1::m1"]),
            ids(&[]),
            2,
            ids(&["GPU-1::m0", "GPU-1::m1"]),
        ),
        // size == available.
        (
            ids(&["GPU-0::m2", "GPU-1::m0"]),
            ids(&[]),
            2,
            ids(&["GPU-0::m2", "GPU-1::m0"]),
        ),
        (all.clone(), ids(&[]), 0, ids(&[])),
        (all.clone(), ids(&["GPU-0::m0"]), 0, ids(&[])),
        // More than available: all available ids.
        (ids(&["GPU-0::m0"]), ids(&[]), 5, ids(&["GPU-0::m0"])),
        // Duplicates, unknown and foreign ids.
        (
            ids(&["GPU-0::m0", "GPU-0::m0", "GPU-0::m1"]),
            ids(&["GPU-0::m0", "GPU-0::m0"]),
            2,
            ids(&["GPU-0::m0", "GPU-0::m1"]),
        ),
        (ids(&["GPU-9::m0", "x", "GPU-0::m1"]), ids(&[]), 1, ids(&["GPU-0::m1"])),
        (
            ids(&["uuid-_-1", "uuid-_-2"]),
            ids(&["uuid-_-2"]),
            2,
            ids(&["uuid-_-2", "uuid-_-1"]),
        ),
        (ids(&[]), ids(&[]), 3, ids(&[])),
    ] {
        assert_eq!(
            node.core.preferred(ResourceSpec::MEMORY, &available, &must, size),
            expected,
            "{must:?} {size} of {available:?}"
        );
    }
}

proptest! {
    #[test]
    fn any_preferred_call_gets_a_legal_answer(
        available in proptest::collection::vec("(GPU-[0-3]::m[0-9]|x|)", 0..12),
        must in proptest::collection::vec("GPU-[0-3]::m[0-9]", 0..4),
        size in 0_usize..14,
        waiting in 0_u64..5,
    ) {
        let mut node = Node::new(&[4096, 4096]);
        if waiting > 0 {
            node.see(simple("a", 1, waiting));
        }
        let answer = node.core.preferred(ResourceSpec::MEMORY, &available, &must, size);
        let possible: BTreeSet<&String> = available.iter().chain(&must).collect();
        prop_assert_eq!(answer.len(), size.min(possible.len()));
        let distinct: BTreeSet<&String> = answer.iter().collect();
        prop_assert_eq!(distinct.len(), answer.len());
        prop_assert!(distinct.is_subset(&possible));
        let must: BTreeSet<&String> = must.iter().collect();
        if must.len() <= size {
            prop_assert!(must.is_subset(&distinct));
        }
    }

    #[test]
    fn no_ids_make_allocate_panic(ids in proptest::collection::vec("(GPU-[01]::(m[0-9]{1,3}|c)|.{0,20})", 0..6)) {
        let mut node = Node::new(&[4096, 4096]);
        let distinct: BTreeSet<&String> = ids.iter().collect();
        if let Ok(names) = node.core.allocate(ResourceSpec::MEMORY, &ids) {
            prop_assert_eq!(names.len(), 1);
            prop_assert_eq!(distinct.len(), ids.len());
            prop_assert!(!ids.is_empty());
        }
    }
}

#[test]
fn ids_are_steered_to_the_gpu_of_the_pod_that_waits() {
    let mut node = Node::new(&[8192, 8192]);
    node.see(simple("a", 1, 3));
    let free = node.free_ids();
    let chosen = node.core.preferred(ResourceSpec::MEMORY, &free, &[], 3);
    assert!(chosen.iter().all(|id| id.starts_with("GPU-1::")), "{chosen:?}");
    // Another size: no pod is waiting for it.
    assert!(
        node.core
            .preferred(ResourceSpec::MEMORY, &free, &[], 2)
            .iter()
            .all(|id| id.starts_with("GPU-0::"))
    );
    // A pod that is being deleted steals nothing (R4).
    node.change("a", |pod| pod.deleting = true);
    assert!(
        node.core
            .preferred(ResourceSpec::MEMORY, &free, &[], 3)
            .iter()
            .all(|id| id.starts_with("GPU-0::"))
    );
}

/// Each pod is steered once even before the checkpoint is read.
#[test]
fn two_equal_pods_are_steered_once_each() {
    let mut node = Node::new(&[8192, 8192]);
    node.see(simple("a", 1, 3));
    node.see(simple("b", 0, 3));
    let mut gpus = Vec::new();
    let mut free = node.free_ids();
    for _ in 0..2 {
        let chosen = node.core.preferred(ResourceSpec::MEMORY, &free, &[], 3);
        node.core.allocate(ResourceSpec::MEMORY, &chosen).expect("allocated");
        free.retain(|id| !chosen.contains(id));
        gpus.push(chosen[0].split("::").next().expect("a GPU").to_owned());
    }
    assert_eq!(gpus, ["GPU-1", "GPU-0"]);
}

#[test]
fn foreign_doubled_and_missing_ids_are_refused_in_words() {
    let mut node = Node::new(&[2048]);
    for (resource, ids, expected) in [
        (ResourceSpec::MEMORY, vec![], "no device of aliyun.com/gpu-mem"),
        (ResourceSpec::MEMORY, vec!["x"], "\"x\" is not an id of this plugin"),
        (ResourceSpec::MEMORY, vec!["uuid-_-1"], "is not an id of this plugin"),
        (
            ResourceSpec::MEMORY,
            vec!["GPU-9::m0"],
            "GPU GPU-9, which this node does not have (GPUs: GPU-0)",
        ),
        (
            ResourceSpec::MEMORY,
            vec!["GPU-0::m2"],
            "slot 2 of a GPU that has only 2 units of GiB",
        ),
        (
            ResourceSpec::MEMORY,
            vec!["GPU-0::c"],
            "does not belong to aliyun.com/gpu-mem",
        ),
        (
            ResourceSpec::COUNT,
            vec!["GPU-0::m0"],
            "does not belong to aliyun.com/gpu-count",
        ),
        (
            ResourceSpec::MEMORY,
            vec!["GPU-0::m1", "GPU-0::m1"],
            "\"GPU-0::m1\" appears twice",
        ),
    ] {
        let ids: Vec<String> = ids.into_iter().map(str::to_owned).collect();
        let error = node.core.allocate(resource, &ids).expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn allocate_answers_from_the_ids_alone() {
    let mut node = Node::new(&[4096]);
    let one = node
        .core
        .allocate(ResourceSpec::MEMORY, &ids(&["GPU-0::m0", "GPU-0::m1"]))
        .expect("allocated");
    node.restart_agent();
    let again = node
        .core
        .allocate(ResourceSpec::MEMORY, &ids(&["GPU-0::m1", "GPU-0::m0"]))
        .expect("allocated");
    assert_eq!(one, again, "the order means nothing, and a restart changes nothing");
    assert!(one[0].starts_with("divvy.dev/grant="), "{one:?}");
    assert_eq!(
        node.core
            .allocate(ResourceSpec::COUNT, &ids(&["GPU-0::c"]))
            .expect("allocated"),
        Vec::<String>::new()
    );
}

#[test]
fn allocating_4096_ids_gives_one_name() {
    let mut node = Node::new(&[4096 * 1024]);
    let all = node.free_ids();
    assert_eq!(all.len(), 4096);
    let chosen = node.core.preferred(ResourceSpec::MEMORY, &all, &[], 4096);
    assert_eq!(node.core.allocate(ResourceSpec::MEMORY, &chosen).expect("allocated").len(), 1);
}

#[test]
fn a_container_finds_its_gpu_its_variables_and_void() {
    let mut node = Node::new(&[16384, 16384]);
    node.node_files.devices = [("/dev/nvidia-uvm".to_owned(), None)].into();
    node.see(simple("a", 1, 3));
    node.admit("a").expect("admitted");
    let running = node.start("a", "main").expect("started");
    assert_eq!(
        running.env,
        [
            "ALIYUN_COM_GPU_MEM_IDX=1",
            "ALIYUN_COM_GPU_MEM_POD=3",
            "ALIYUN_COM_GPU_MEM_CONTAINER=3",
            "ALIYUN_COM_GPU_MEM_DEV=16",
            "NVIDIA_VISIBLE_DEVICES=void"
        ]
    );
    assert_eq!(running.devices, ["/dev/nvidia1", "/dev/nvidiactl", "/dev/nvidia-uvm"]);
}

#[test]
fn the_record_is_written_before_the_spec() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 1));
    node.admit("a").expect("admitted");
    let PreStart::Granted { actions, .. } = node.pre_start("a", "main") else {
        panic!("granted");
    };
    assert!(
        matches!(
            actions.as_slice(),
            [AgentAction::WriteRecord(_), AgentAction::WriteSpec { .. }]
        ),
        "{actions:?}"
    );
}

#[test]
fn the_holders_of_ids_are_containers_that_have_not_ended() {
    let mut node = Node::new(&[4096]);
    let ids = ids(&["GPU-0::m0", "GPU-0::m1"]);
    for uid in ["a", "b"] {
        node.see(simple(uid, 0, 2));
        node.allocate_as(uid, "main", &ids).expect("allocated");
    }
    let holders = |node: &Node, ids: &[String]| {
        let holders = node.core.holders(ResourceSpec::MEMORY, ids);
        holders.into_iter().map(|key| key.uid.clone()).collect::<Vec<_>>()
    };
    assert_eq!(holders(&node, &ids), ["a", "b"]);
    assert_eq!(holders(&node, &ids[..1]), [""; 0]);
    node.change("a", |pod| pod.phase = divvy_model::Phase::Succeeded);
    assert_eq!(holders(&node, &ids), ["b"]);
}

/// Return a pod with an annotation about its isolation.
pub(crate) fn isolated(uid: &str, isolation: Option<Isolation>, containers: &[(&str, ContainerKind, u64)]) -> Pod {
    let mut pod = pod(uid, 0, containers);
    let rules = isolation.map(|isolation| GpuRules {
        isolation: Some(isolation),
        ..GpuRules::default()
    });
    pod.request.rules = rules.map(|rules| Arc::new(Ok(rules)));
    pod
}

/// A pod is limited on each GPU on which the driver can enforce a limit.
#[test]
fn the_driver_limits_pods_to_their_effective_totals() {
    let containers = [("init", Init, 2), ("main", App, 2), ("other", App, 1)];
    for (enforcement, isolation, expected, are_required) in [
        (Some(Enforcement::CGROUP), None, Some(3072), false),
        (Some(Enforcement::CGROUP), Some(Isolation::Hard), Some(3072), true),
        (Some(Enforcement::CGROUP), Some(Isolation::Soft), Some(3072), true),
        (Some(Enforcement::CGROUP), Some(Isolation::None), None, false),
        (None, None, None, false),
        (None, Some(Isolation::None), None, false),
    ] {
        let mut node = Node::new(&[4096]);
        node.set_enforcement(0, enforcement);
        node.see(isolated("a", isolation, &containers));
        node.admit("a").expect("admitted");
        for (container, ..) in containers {
            let PreStart::Granted { actions, .. } = node.pre_start("a", container) else {
                panic!("granted");
            };
            let limits = Limits::of(&actions);
            let gpus = expected.map(|memory| ("GPU-0".to_owned(), MiB(memory)));
            assert_eq!(
                limits.gpus,
                gpus.into_iter().collect::<Vec<_>>(),
                "{enforcement:?} {isolation:?}"
            );
            assert_eq!(limits.are_required, are_required, "{enforcement:?} {isolation:?}");
        }
    }
}

/// Nothing enforces the shares of the pod's GPU any more.
#[test]
fn a_pod_with_isolation_does_not_start_without_enforcement() {
    let mut node = Node::new(&[4096]);
    node.see(isolated("a", Some(Isolation::Hard), &[("main", App, 3)]));
    node.admit("a").expect("admitted");
    let PreStart::Refused { reason, text, .. } = node.pre_start("a", "main") else {
        panic!("refused");
    };
    assert_eq!(reason, Reason::GpuUnavailable);
    assert!(
        text.contains("divvy.dev/isolation: hard") && text.contains("Delete the pod"),
        "{text}"
    );
    node.set_enforcement(0, Some(Enforcement::CGROUP));
    assert!(matches!(node.pre_start("a", "main"), PreStart::Granted { .. }));
}

/// Return a node whose containers can get the guard, and whose driver's spec provides CUDA's library.
pub(crate) fn guarding_node() -> Node {
    guarding_node_with(None)
}

/// The same, and perhaps with this library for the loaders of containers.
fn guarding_node_with(audit: Option<&str>) -> Node {
    let settings = CoreSettings {
        guard: Some(Guard {
            audit: audit.map(str::to_owned),
            cuda: "/state/guard/1/libcuda.so.1".to_owned(),
            nvml: "/state/guard/1/libnvidia-ml.so.1".to_owned(),
            shares: "/state/shares".to_owned(),
            reaction: Reaction::Event,
        }),
        ..settings()
    };
    let mut node = Node::with(settings, vec![gpu(0, 4096), gpu(1, 4096)]);
    for index in 0..2 {
        node.set_enforcement(index, Some(Enforcement::GUARD));
    }
    node.node_files.specs[0].container_edits.mounts = vec![CdiMount {
        host_path: "/usr/lib64/libcuda.so.550.54.15".to_owned(),
        container_path: "/usr/lib64/libcuda.so.550.54.15".to_owned(),
        ..CdiMount::default()
    }];
    node
}

/// Return the edits in a grant's spec.
pub(crate) fn edits(node: &Node) -> divvy_cdi::Edits {
    let spec = node.specs.values().next().expect("a spec");
    let spec = divvy_cdi::Spec::parse(spec).expect("valid");
    spec.devices[0].container_edits.clone()
}

/// Return the mounts in a grant's spec.
fn mounts(node: &Node) -> Vec<String> {
    let edits = edits(node);
    let mounts = edits.mounts.iter();
    mounts
        .map(|mount| format!("{} -> {}", mount.host_path, mount.container_path))
        .collect()
}

#[test]
fn the_guard_replaces_cudas_library_and_brings_the_pods_files() {
    let mut node = guarding_node();
    node.see(isolated("a", None, &[("init", Init, 3), ("main", App, 2)]));
    node.admit("a").expect("admitted");
    node.start("a", "init").expect("started");
    let PreStart::Granted { actions, .. } = node.pre_start("a", "main") else {
        panic!("granted");
    };
    let limits = Limits::of(&actions);
    let guarded = |cores| Guarded {
        uuid: "GPU-0".to_owned(),
        memory: MiB(3072),
        cores,
    };
    assert_eq!((limits.guarded, limits.are_required), (vec![guarded(0)], false));
    node.start("a", "main").expect("started");
    assert_eq!(
        mounts(&node),
        [
            "/state/guard/1/libcuda.so.1 -> /usr/lib64/libcuda.so.550.54.15",
            "/usr/lib64/libcuda.so.550.54.15 -> /run/divvy/guard/libcuda.so.real",
            "/state/guard/1/libcuda.so.1 -> /run/divvy/guard/libcuda.so.1",
            "/state/shares/a/GPU-0/limits -> /run/divvy/share/GPU-0/limits",
            "/state/shares/a/GPU-0/usage -> /run/divvy/share/GPU-0/usage",
        ]
    );
    // A reconciliation makes the same spec again, from the record alone.
    let specs = std::mem::take(&mut node.specs);
    node.reconcile();
    assert_eq!(node.specs, specs);
}

#[test]
fn only_guarded_containers_get_the_loaders_library() {
    for (isolation, expected) in [(None, true), (Some(Isolation::None), false)] {
        let mut node = guarding_node_with(Some("/state/guard/1/libdivvy-guard-audit.so"));
        node.see(isolated("a", isolation, &[("main", App, 3)]));
        node.admit("a").expect("admitted");
        node.start("a", "main").expect("started");
        let mount = "/state/guard/1/libdivvy-guard-audit.so -> /run/divvy/guard/libdivvy-guard-audit.so".to_owned();
        assert_eq!(mounts(&node).contains(&mount), expected, "{isolation:?}");
        for variable in [
            "LD_AUDIT=/run/divvy/guard/libdivvy-guard-audit.so",
            "GLIBC_TUNABLES=glibc.rtld.optional_static_tls=8192",
        ] {
            assert_eq!(edits(&node).env.contains(&variable.to_owned()), expected, "{isolation:?}");
        }
    }
}

#[test]
fn a_pod_is_guarded_if_all_containers_started_guarded() {
    for (enforcement, expected) in [(Some(Enforcement::GUARD), true), (None, false)] {
        let mut node = guarding_node();
        node.set_enforcement(0, enforcement);
        node.see(isolated("a", None, &[("first", App, 1), ("second", App, 2)]));
        node.admit("a").expect("admitted");
        node.start("a", "first").expect("started");
        node.set_enforcement(0, Some(Enforcement::GUARD));
        node.start("a", "second").expect("started");
        assert_eq!(node.core.is_guarded("a"), expected, "{enforcement:?}");
    }
}

/// An unguarded pod wants no isolation, or has the whole GPU.
#[test]
fn unguarded_pods_get_the_drivers_own_library() {
    let mut whole = isolated("a", None, &[("main", App, 4)]);
    let Held::Allocation(allocation) = &mut whole.held else {
        panic!("it has an allocation");
    };
    allocation.gpus[0].whole = true;
    for pod in [isolated("a", Some(Isolation::None), &[("main", App, 4)]), whole] {
        let mut node = guarding_node();
        node.see(pod);
        node.admit("a").expect("admitted");
        node.start("a", "main").expect("started");
        assert_eq!(
            mounts(&node),
            ["/usr/lib64/libcuda.so.550.54.15 -> /usr/lib64/libcuda.so.550.54.15"]
        );
    }
}

/// The driver limits memory, and the guard limits compute time and shows the share.
/// The pod starts if the enforcement that it needs is available.
#[test]
fn driver_and_guard_together_each_enforce_their_part() {
    let missing = "the container waits";
    for (isolation, cores, cuda, expected) in [
        (None, 0, true, "driver and guard"),
        (Some(Isolation::Soft), 0, true, "driver and guard"),
        (Some(Isolation::Hard), 0, true, "driver must, and guard"),
        (Some(Isolation::Hard), 30, true, "driver must, and guard"),
        (Some(Isolation::None), 0, true, ""),
        (None, 0, false, "driver"),
        (Some(Isolation::Soft), 0, false, "driver must"),
        (Some(Isolation::Hard), 0, false, "driver must"),
        (Some(Isolation::Hard), 30, false, missing),
        (None, 30, false, missing),
    ] {
        let mut node = guarding_node();
        node.set_enforcement(0, Some(Enforcement::CGROUP.and(Enforcement::GUARD)));
        if !cuda {
            node.node_files.specs[0].container_edits.mounts.clear();
        }
        let mut pod = with_cores(isolation);
        if let Held::Allocation(allocation) = &mut pod.held {
            allocation.gpus[0].cores = cores;
        }
        node.see(pod);
        node.admit("a").expect("admitted");
        let found = match node.pre_start("a", "main") {
            PreStart::Granted { actions, .. } => {
                let limits = Limits::of(&actions);
                let is_event = |action: &AgentAction| matches!(action, AgentAction::Event { reason: NOT_LIMITED, .. });
                assert!(!actions.iter().any(is_event), "its memory is limited: {actions:?}");
                match (&limits.gpus[..], &limits.guarded[..], limits.are_required) {
                    ([(_, MiB(3072))], [guarded], false) if guarded.cores == cores => "driver and guard",
                    ([(_, MiB(3072))], [guarded], true) if guarded.cores == cores => "driver must, and guard",
                    ([(_, MiB(3072))], [], false) => "driver",
                    ([(_, MiB(3072))], [], true) => "driver must",
                    ([], [], false) => "",
                    other => panic!("{other:?}"),
                }
            }
            PreStart::Refused { .. } => missing,
            other => panic!("{other:?}"),
        };
        assert_eq!(found, expected, "{isolation:?} {cores} {cuda}");
    }
}

/// Other pods start, and an event says that they are not limited.
#[test]
fn without_cudas_library_only_a_pod_with_isolation_waits() {
    let start = |isolation| {
        let mut node = guarding_node();
        node.node_files.specs[0].container_edits.mounts.clear();
        node.see(isolated("a", isolation, &[("main", App, 3)]));
        node.admit("a").expect("admitted");
        node.pre_start("a", "main")
    };
    let PreStart::Refused { text, .. } = start(Some(Isolation::Soft)) else {
        panic!("refused");
    };
    assert!(
        text.contains("(divvy.dev/isolation)") && text.contains("divvy cdi generate"),
        "{text}"
    );
    let PreStart::Granted { actions, .. } = start(None) else {
        panic!("granted");
    };
    assert_eq!(Limits::of(&actions).guarded, []);
    let events = actions
        .iter()
        .filter(|action| matches!(action, AgentAction::Event { reason: NOT_LIMITED, .. }));
    assert_eq!(events.count(), 1, "{actions:?}");
}

/// Return a pod with 3 GiB and 30 % of the compute time of GPU 0.
pub(crate) fn with_cores(isolation: Option<Isolation>) -> Pod {
    let mut pod = isolated("a", isolation, &[("main", App, 3)]);
    let Held::Allocation(allocation) = &mut pod.held else {
        panic!("it has an allocation");
    };
    allocation.gpus[0].cores = 30;
    pod
}

#[test]
fn a_compute_time_share_starts_only_where_limited() {
    for (isolation, enforcement, cuda, starts) in [
        (None, Some(Enforcement::GUARD), true, true),
        (None, Some(Enforcement::GUARD), false, false),
        (Some(Isolation::Soft), Some(Enforcement::GUARD), true, true),
        // The driver's limit is only on memory.
        (None, Some(Enforcement::CGROUP), true, false),
        (None, None, true, false),
        (Some(Isolation::None), None, false, true),
    ] {
        let mut node = guarding_node();
        node.set_enforcement(0, enforcement);
        if !cuda {
            node.node_files.specs[0].container_edits.mounts.clear();
        }
        node.see(with_cores(isolation));
        node.admit("a").expect("admitted");
        let case = format!("{isolation:?} {enforcement:?} {cuda}");
        match node.pre_start("a", "main") {
            PreStart::Granted { actions, .. } if starts => {
                let cores: Vec<u32> = Limits::of(&actions).guarded.iter().map(|guarded| guarded.cores).collect();
                let expected: &[u32] = if isolation == Some(Isolation::None) { &[] } else { &[30] };
                assert_eq!(cores, expected, "{case}");
            }
            PreStart::Refused { text, .. } if !starts => {
                assert!(text.contains("divvy.dev/gpu-cores"), "{case}: {text}");
            }
            other => panic!("{case}: {other:?}"),
        }
    }
}

/// Case K09 of `docs/compatibility/kubelet.md`.
#[test]
fn a_container_that_restarts_gets_the_same_a_hundred_times() {
    let mut node = Node::new(&[4096, 4096]);
    node.see(simple("a", 1, 4));
    node.admit("a").expect("admitted");
    let first = node.start("a", "main").expect("started");
    let (records, specs) = (node.records.clone(), node.specs.clone());
    for _ in 0..100 {
        assert_eq!(node.start("a", "main").expect("started again"), first);
    }
    assert_eq!((node.records.clone(), node.specs.clone()), (records, specs));
}

/// Cases K16 and K17 of `docs/compatibility/kubelet.md`, and R3 of `docs/compatibility/races.md`.
#[test]
fn init_containers_and_sidecars_share_the_gpu_and_count_once() {
    for (containers, effective) in [
        (vec![("i", Init, 1), ("s", Sidecar, 1), ("a", App, 1)], 2),
        (vec![("i", Init, 4), ("a", App, 1)], 4),
        (vec![("i", Init, 1), ("a", App, 4)], 4),
        (vec![("i", Init, 4), ("j", Init, 2), ("a", App, 4)], 4),
        (vec![("i", Init, 2), ("s", Sidecar, 1), ("a", App, 2), ("b", App, 1)], 4),
    ] {
        let mut node = Node::new(&[4096, 4096]);
        let names: Vec<&str> = containers.iter().map(|(name, ..)| *name).collect();
        node.see(pod("a", 1, &containers));
        node.admit("a").expect("admitted");
        for name in &names {
            let running = node.start("a", name).expect("started");
            assert!(
                running.devices.contains(&"/dev/nvidia1".to_owned()),
                "{containers:?} {name}: {running:?}"
            );
        }
        assert!(
            node.handouts.iter().flat_map(|h| &h.ids).all(|id| id.starts_with("GPU-1::")),
            "{containers:?}: {:?}",
            node.handouts
        );
        // The rest of the GPU is what the formula leaves, not the sum over containers.
        let left = 4 - effective;
        if left > 0 {
            node.see(simple("b", 1, left));
            node.admit("b").expect("admitted");
            node.start("b", "main").expect("fits next to it");
        }
        node.see(simple("c", 1, 1));
        node.allocate_as("c", "main", &ids(&["GPU-0::m0"])).expect("allocated");
        assert_eq!(node.start("c", "main").expect_err("full").0, Reason::MemoryHeld);
    }
}

/// Cases R20 and R22 of `docs/compatibility/races.md`.
/// The refusal says what to check, and the pod gets one event.
#[test]
fn a_pod_bound_without_the_extender_is_refused_with_advice() {
    let mut node = Node::new(&[4096]);
    node.see(divvy_model::Pod {
        held: Held::Nothing,
        ..simple("a", 0, 1)
    });
    node.admit("a").expect("any legal answer");
    for _ in 0..3 {
        let (reason, text) = node.start("a", "main").expect_err("no allocation");
        assert_eq!(reason, Reason::NoAllocation);
        for part in [
            "default/pod-a",
            "divvy.dev/allocation",
            "extender",
            "spec.nodeName",
            "ignorable",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
    assert_eq!(node.events.len(), 1, "{:?}", node.events);
    assert!(node.records.is_empty() && node.specs.is_empty());
}

#[test]
fn an_allocation_that_cannot_be_read_is_refused() {
    let mut node = Node::new(&[4096]);
    let annotations = [(names::ALLOCATION.to_owned(), "{\"v\":9}".to_owned())].into();
    node.see(divvy_model::Pod {
        held: Held::from_annotations(&annotations),
        ..simple("a", 0, 1)
    });
    node.admit("a").expect("any legal answer");
    let (reason, text) = node.start("a", "main").expect_err("unreadable");
    assert_eq!(reason, Reason::NoAllocation);
    assert!(text.contains("version 9"), "{text}");
    assert_eq!(node.events[0].1, "NoAllocation");
}

#[test]
fn gpushares_annotations_are_good_enough() {
    let mut node = Node::new(&[4096, 4096]);
    let annotations = [
        (names::ALIYUN_IDX.to_owned(), "1".to_owned()),
        (names::ALIYUN_POD.to_owned(), "3".to_owned()),
    ];
    node.see(divvy_model::Pod {
        held: Held::from_annotations(&annotations.into()),
        ..simple("a", 0, 3)
    });
    node.admit("a").expect("admitted");
    assert!(
        node.start("a", "main")
            .expect("started")
            .devices
            .contains(&"/dev/nvidia1".to_owned())
    );
    assert_eq!(node.records[&key("a", "main")].gpus[0].memory, MiB(3072));
}

#[test]
fn answers_of_another_plugins_time_are_booked_and_need_no_spec() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 3));
    node.handouts.push(divvy_agent_core::Handout {
        key: key("a", "main"),
        resource: names::GPU_MEM.to_owned(),
        ids: ["GPU-0-_-0".to_owned(), "GPU-0-_-1".to_owned(), "GPU-0-_-2".to_owned()].into(),
        grant: None,
    });
    assert!(matches!(node.pre_start("a", "main"), PreStart::Granted { .. }));
    assert!(node.specs.is_empty());
    assert_eq!(node.records.len(), 1);
    node.see(simple("b", 0, 2));
    node.allocate_as("b", "main", &ids(&["GPU-0::m0", "GPU-0::m1"]))
        .expect("allocated");
    assert_eq!(
        node.start("b", "main").expect_err("only one unit is left").0,
        Reason::MemoryHeld
    );
}

#[test]
fn no_container_starts_on_a_failed_lost_or_absent_gpu() {
    for (health, reason, expected) in [
        (Health::Failed, Some("XID 79"), "has failed (XID 79)"),
        (Health::Lost, None, "is lost"),
    ] {
        let mut node = Node::new(&[4096, 4096]);
        node.see(simple("a", 1, 1));
        node.admit("a").expect("admitted");
        node.set_health(1, health, reason);
        let (class, text) = node.start("a", "main").expect_err("failed GPU");
        assert_eq!(class, Reason::GpuUnavailable);
        assert!(text.contains(expected) && text.contains("starts automatically"), "{text}");
        node.set_health(1, Health::Ok, None);
        node.start("a", "main").expect("recovered");
    }
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 7, 1));
    node.admit("a").expect("admitted");
    let (class, text) = node.start("a", "main").expect_err("no such GPU");
    assert_eq!(class, Reason::GpuUnavailable);
    assert!(text.contains("GPU-7") && text.contains("GPUs: GPU-0"), "{text}");
}

#[test]
fn without_a_readable_checkpoint_nothing_starts() {
    let mut node = Node::new(&[4096]);
    node.see(simple("a", 0, 1));
    node.admit("a").expect("admitted");
    let facts = DecisionFacts {
        handouts: None,
        ..node.facts()
    };
    let ids = node.ids_of("a", "main");
    assert!(matches!(
        node.core.pre_start(ResourceSpec::MEMORY, &ids, &facts),
        PreStart::Wait(Reason::Identity, _)
    ));
    for unknown in [vec![], vec!["GPU-0::m3".to_owned()], vec!["x".to_owned()]] {
        assert!(
            matches!(node.pre_start_ids(&unknown), PreStart::Wait(Reason::Identity, _)),
            "{unknown:?}"
        );
    }
}

#[test]
fn a_whole_gpu_is_given_alone() {
    let mut node = Node::new(&[4096]);
    let mut whole = simple("a", 0, 1);
    if let Held::Allocation(allocation) = &mut whole.held {
        allocation.gpus[0].whole = true;
    }
    node.see(whole);
    node.admit("a").expect("admitted");
    node.start("a", "main").expect("started");
    node.see(simple("b", 0, 1));
    node.admit("b").expect("admitted");
    assert_eq!(node.start("b", "main").expect_err("exclusive").0, Reason::MemoryHeld);
}
