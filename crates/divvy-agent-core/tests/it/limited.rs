//! Which pods the driver limits while their containers run.

use std::sync::Arc;

use divvy_agent_core::LimitedPod;
use divvy_model::ContainerKind::{App, Init};
use divvy_model::{ContainerKind, Enforcement, GpuRules, Isolation, MiB, Phase};

use crate::node::{Node, pod};

/// A pod's UID, its limits, and whether only one container has them.
type Limited = (String, Vec<(String, MiB)>, bool);

fn started(enforcement: Option<Enforcement>, isolation: Option<Isolation>, containers: &[(&str, ContainerKind, u64)]) -> Node {
    let mut node = Node::new(&[8192]);
    node.set_enforcement(0, enforcement);
    let mut pod = pod("a", 0, containers);
    let rules = isolation.map(|isolation| GpuRules {
        isolation: Some(isolation),
        ..GpuRules::default()
    });
    pod.request.rules = rules.map(|rules| Arc::new(Ok(rules)));
    node.see(pod);
    node.admit("a").expect("admitted");
    node.start("a", containers[0].0).expect("started");
    node
}

fn limited(node: &Node) -> Vec<Limited> {
    let found = node.core.limited().into_iter();
    found
        .map(|LimitedPod { uid, pod, gpus, alone }| {
            assert_eq!(pod.to_string(), "default/pod-a");
            (uid, gpus, alone)
        })
        .collect()
}

fn share(mib: u64, alone: bool) -> Vec<Limited> {
    vec![("a".to_owned(), vec![("GPU-0".to_owned(), MiB(mib))], alone)]
}

/// An agent that restarts limits running containers in the same way.
#[test]
fn containers_are_limited_like_their_pods_at_start() {
    let one: &[_] = &[("main", App, 3)];
    let two: &[_] = &[("main", App, 2), ("other", App, 1)];
    let init: &[_] = &[("init", Init, 3), ("main", App, 2)];
    for (enforcement, isolation, containers, expected) in [
        (Some(Enforcement::CGROUP), None, one, share(3072, true)),
        (Some(Enforcement::CGROUP), None, two, share(3072, false)),
        (Some(Enforcement::CGROUP), None, init, share(3072, false)),
        (Some(Enforcement::CGROUP), Some(Isolation::Hard), one, share(3072, true)),
        (Some(Enforcement::CGROUP), Some(Isolation::None), one, vec![]),
        (None, None, one, vec![]),
    ] {
        let mut node = started(enforcement, isolation, containers);
        assert_eq!(limited(&node), expected, "{enforcement:?} {isolation:?} {containers:?}");
        node.restart_agent();
        assert_eq!(limited(&node), expected, "{enforcement:?} {isolation:?} {containers:?}");
    }
}

/// A pod is unknown if it has no grant or no object.
#[test]
fn an_ended_or_unknown_pod_is_not_limited() {
    let mut node = started(Some(Enforcement::CGROUP), None, &[("main", App, 3)]);
    node.see(pod("b", 0, &[("main", App, 1)]));
    assert_eq!(limited(&node), share(3072, true));
    node.object_gone("a");
    assert_eq!(limited(&node), [], "it may have had isolation: none");
    let mut node = started(Some(Enforcement::CGROUP), None, &[("main", App, 3)]);
    node.change("a", |pod| pod.phase = Phase::Succeeded);
    assert_eq!(limited(&node), share(3072, true), "a container still runs");
    node.processes_end("a");
    assert_eq!(limited(&node), []);
}
