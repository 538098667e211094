//! Tests of a change of `--memory-unit` on a cluster with running pods.

use std::collections::BTreeMap;

use divvy_audit::{Audit, AuditLimits, ContainerReport, Fact, Moment, WatchedKind};
use divvy_model::{Allocation, ContainerShare, GpuShare, Held, MemoryUnit, MiB, Node, Phase, Pod, kept, names};
use divvy_placement::Ledger;
use proptest::prelude::*;

use divvy_testkit::nodes::*;

fn unit(mib: u64) -> MemoryUnit {
    MemoryUnit::new(mib).expect("not zero")
}

/// A node with one GPU of this size in MiB, as its agent publishes it, after the kubelet has received the new devices.
fn node(mib: u64, now: MemoryUnit, others: &[MemoryUnit]) -> Node {
    let mut node = divvy_node("n1", &[1]);
    if let Some(Ok(inventory)) = &mut node.inventory {
        (inventory.unit, inventory.other_units) = (now, others.iter().copied().collect());
        inventory.gpus[0].total = MiB(mib);
        inventory.gpus[0].units = now.units_in(MiB(mib));
        node.capacity_units = inventory.gpus[0].units;
    }
    node
}

/// A running pod whose containers request these units, as the extender bound it when the unit was `unit`.
fn bound(name: &str, units: &[u64], unit: MemoryUnit) -> Pod {
    let request = request(units);
    let uuid = uuid("n1", 0);
    let memory = |units: u64| unit.memory(units).expect("little");
    let share = |units: u64| ContainerShare {
        uuid: uuid.clone(),
        memory: memory(units),
        cores: 0,
    };
    let containers = request.containers.iter().filter(|container| container.units > 0);
    let gpu = GpuShare {
        uuid: uuid.clone(),
        memory: memory(request.effective_units().expect("few")),
        cores: 0,
        whole: false,
        enforcement: None,
    };
    let allocation = Allocation {
        v: 1,
        containers: containers
            .map(|container| (container.name.clone(), vec![share(container.units)]))
            .collect(),
        gpus: vec![gpu],
    };
    Pod {
        request,
        held: Held::Allocation(allocation),
        phase: Phase::Running,
        container_running: true,
        ..divvy_pod(name, "n1", 0, 1)
    }
}

fn ids(facts: Vec<Fact>) -> Vec<&'static str> {
    let mut audit = Audit::new(AuditLimits::default());
    for (at, fact) in facts.into_iter().enumerate() {
        let revision = Some(100 + at as u64);
        let at_ms = Some(1_000_000 + at as i64 * 1000);
        audit.take(Moment { revision, at_ms }, fact);
    }
    audit.finish(None).findings.iter().map(|finding| finding.what.id()).collect()
}

fn there(pod: &Pod) -> Fact {
    Fact::Pod {
        pod: pod.clone(),
        delete_by_ms: None,
    }
}

/// Audit a cluster that consists of this node and this pod.
fn look(node: &Node, pod: &Pod) -> Vec<&'static str> {
    let mut facts = Vec::new();
    for (kind, fact) in [
        (WatchedKind::Nodes, Fact::Node(node.clone())),
        (WatchedKind::Pods, there(pod)),
    ] {
        facts.extend([Fact::ListBegins { kind, why: None }, fact, Fact::ListEnds { kind }]);
    }
    ids(facts)
}

fn a_unit() -> impl Strategy<Value = MemoryUnit> {
    prop_oneof![Just(1), Just(256), Just(1024), Just(2048), 1_u64..3000].prop_map(unit)
}

fn requests() -> impl Strategy<Value = Vec<u64>> {
    prop::collection::vec(0_u64..20, 1..4).prop_filter("asks", |units| units.iter().any(|units| *units > 0))
}

proptest! {
    /// This holds for a single look and for the history while the node still names the former unit.
    #[test]
    fn a_pod_of_a_former_unit_is_sound(
        before in a_unit(), now in a_unit(), units in requests(),
    ) {
        let pod = bound("a", &units, before);
        let others: Vec<MemoryUnit> = [before].into_iter().filter(|unit| *unit != now).collect();
        let (old, new) = (node(400_000, before, &[]), node(400_000, now, &others));
        prop_assert_eq!(look(&new, &pod), [""; 0]);
        prop_assert_eq!(ids(vec![Fact::Node(old), there(&pod), Fact::Node(new), there(&pod)]), [""; 0]);
    }

    #[test]
    fn an_allocation_right_in_no_unit_is_faulty(
        before in a_unit(), now in a_unit(), units in requests(), at in any::<prop::sample::Index>(), memory in 0_u64..60_000, of_container: bool,
    ) {
        let mut pod = bound("a", &units, before);
        let Held::Allocation(allocation) = &mut pod.held else { unreachable!() };
        if of_container {
            let names: Vec<String> = allocation.containers.keys().cloned().collect();
            let name = at.get(&names);
            allocation.containers.get_mut(name).expect("it is there")[0].memory = MiB(memory);
        } else {
            allocation.gpus[0].memory = MiB(memory);
        }
        let right = [before, now].into_iter().any(|unit| bound("a", &units, unit).held == pod.held);
        let found = look(&node(400_000, now, &[before]), &pod);
        prop_assert_eq!(found.contains(&"allocation-not-as-asked"), !right, "{:?}", found);
    }

    /// A pod that no longer holds memory needs no excuse.
    #[test]
    fn an_unnamed_unit_excuses_no_memory_holder(before in a_unit(), now in a_unit(), units in requests()) {
        let pod = bound("a", &units, before);
        let found = look(&node(400_000, now, &[]), &pod);
        prop_assert_eq!(found.contains(&"allocation-not-as-asked"), before != now);
        let ended = Pod { phase: Phase::Succeeded, container_running: false, ..pod };
        prop_assert_eq!(look(&node(400_000, now, &[]), &ended), [""; 0], "it holds nothing, and its agent has forgotten it");
    }

    /// The extender counts a pod's memory as allocated, whatever the unit is by now.
    #[test]
    fn a_pod_of_a_former_unit_takes_what_it_was_given(before in a_unit(), now in a_unit(), units in requests()) {
        let pod = bound("a", &units, before);
        let Held::Allocation(allocation) = &pod.held else { unreachable!() };
        let mut ledger = Ledger::new(now);
        ledger.apply_node(&node(400_000, now, &[before]));
        ledger.apply_pod(kept(pod.clone()));
        let used = ledger.node("n1").map(|view| view.used(0));
        prop_assert_eq!(used, Some(allocation.total()));
        prop_assert_eq!(ledger.overbooked_since(0), Vec::new());
    }
}

#[test]
fn an_unexplained_small_allocation_frees_nothing() {
    let pod = bound("a", &[4], unit(256));
    for (others, used) in [(vec![], 4096), (vec![unit(512)], 4096), (vec![unit(256)], 1024)] {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(&node(16384, GIB, &others));
        ledger.apply_pod(kept(pod.clone()));
        assert_eq!(ledger.node("n1").map(|view| view.used(0)), Some(MiB(used)), "{others:?}");
    }
}

/// The agent publishes its inventory before the kubelet has received the devices. For a moment, the node's capacity is in the
/// former unit.
#[test]
fn a_lagging_kubelet_causes_no_double_promise_finding() {
    let (before, now) = (GIB, unit(256));
    let mut node = node(16384, now, &[before]);
    node.capacity_units = 16;
    let mut ledger = Ledger::new(now);
    ledger.apply_node(&node);
    for name in ["a", "b", "c"] {
        let pod = bound(name, &[5], before);
        ledger.apply_pod(Pod {
            container_running: false,
            ..pod
        });
    }
    assert_eq!(ledger.overbooked_since(0), Vec::new());
}

/// 15109 MiB are 59 units of 256 MiB, or 14 units of 1 GiB.
#[test]
fn rounded_off_memory_stays_with_its_pods() {
    let pods = [bound("a", &[32], unit(256)), bound("b", &[27], unit(256))];
    let node = node(15109, GIB, &[unit(256)]);
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&node);
    for pod in &pods {
        ledger.apply_pod(kept(pod.clone()));
    }
    assert_eq!(ledger.overbooked_since(0), Vec::new());
    assert_eq!(ids(vec![Fact::Node(node), there(&pods[0]), there(&pods[1])]), [""; 0]);
}

#[test]
fn a_container_keeps_the_numbers_of_its_pods_unit() {
    let report = |units: &str, of: &str| {
        let env = [
            (names::ALIYUN_IDX, "0"),
            (names::ALIYUN_POD, units),
            (names::ALIYUN_CONTAINER, units),
            (names::ALIYUN_DEV, of),
            (names::VISIBLE_DEVICES, names::VISIBLE_NONE),
        ];
        Fact::Report(ContainerReport {
            node: "n1".to_owned(),
            pod_uid: "u-a".to_owned(),
            container: "c0".to_owned(),
            id: "id".to_owned(),
            running: true,
            gpus: vec![0],
            env: env
                .map(|(name, value)| (name.to_owned(), value.to_owned()))
                .into_iter()
                .collect::<BTreeMap<_, _>>(),
        })
    };
    let pod = bound("a", &[3], GIB);
    let node = node(16384, unit(256), &[GIB]);
    for (units, of, wrong) in [("3", "16", 0), ("12", "64", 0), ("3", "64", 2), ("12", "16", 1)] {
        let found = ids(vec![Fact::Node(node.clone()), there(&pod), report(units, of)]);
        assert_eq!(found, vec!["told-wrong"; wrong], "{units} of {of}");
    }
}
