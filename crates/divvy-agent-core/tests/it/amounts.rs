//! The memory that an allocation books, compared with the devices that the kubelet gave and with what the pod requests.

use std::collections::BTreeMap;

use divvy_agent_core::Reason;
use divvy_model::ContainerKind::{App, Init, Sidecar};
use divvy_model::legacy::LegacyAllocation;
use divvy_model::{Allocation, Held, MemoryUnit, MiB, Pod};

use crate::node::{Node, pod, settings, simple};

fn edited(mut pod: Pod, edit: impl FnOnce(&mut Allocation)) -> Pod {
    if let Held::Allocation(allocation) = &mut pod.held {
        edit(allocation);
    }
    pod
}

fn legacy(units: u64, pod: Pod) -> Pod {
    let gpus = BTreeMap::from([(0, units)]);
    Pod {
        held: Held::Legacy(LegacyAllocation { gpus }),
        ..pod
    }
}

/// Check that both containers of the pod start, or that the first one that does not start reports the reason.
fn check(pod: Pod, expected: Result<(), &str>) {
    let mut node = Node::new(&[16384, 16384]);
    let containers: Vec<String> = pod
        .request
        .memory_containers()
        .map(|container| container.name.clone())
        .collect();
    let uid = pod.uid.clone();
    node.see(pod);
    node.admit(&uid).expect("admitted");
    let refused = containers.iter().find_map(|container| node.start(&uid, container).err());
    match (refused, expected) {
        (None, Ok(())) => {}
        (Some((reason, text)), Err(part)) => {
            assert_eq!(reason, Reason::NoAllocation, "{text}");
            assert!(text.contains(part) && text.contains("Delete the pod"), "{text}");
            assert!(node.records.len() < containers.len());
        }
        (found, expected) => panic!("{found:?} and not {expected:?}"),
    }
}

#[test]
fn an_allocation_below_the_kubelets_devices_starts_nothing() {
    let share = |allocation: &mut Allocation, mib: u64| {
        allocation.gpus[0].memory = MiB(mib);
        allocation
            .containers
            .values_mut()
            .for_each(|shares| shares[0].memory = MiB(mib));
    };
    check(simple("p", 0, 3), Ok(()));
    for mib in [0, 1, 3071] {
        check(
            edited(simple("p", 0, 3), |allocation| share(allocation, mib)),
            Err("3 devices of 1024 MiB each, which is 3072 MiB"),
        );
    }
    check(edited(simple("p", 0, 3), |allocation| share(allocation, 4096)), Ok(()));
    // Each container has no more memory than the pod books, but the two together have more.
    let two = || pod("p", 0, &[("a", App, 3), ("b", App, 3)]);
    check(two(), Ok(()));
    check(
        edited(two(), |allocation| allocation.gpus[0].memory = MiB(3072)),
        Err("its containers may use 6144 MiB of this GPU together"),
    );
    // The rest is booked on a GPU that none of the containers uses.
    let elsewhere = edited(two(), |allocation| {
        let mut other = allocation.gpus[0].clone();
        other.uuid = "GPU-1".to_owned();
        allocation.gpus[0].memory = MiB(3072);
        other.memory = MiB(3072);
        allocation.gpus.push(other);
    });
    check(elsewhere, Err("books 3072 MiB of GPU GPU-0"));
    // An init container may use more than the containers that come after it.
    check(pod("p", 0, &[("i", Init, 5), ("s", Sidecar, 1), ("m", App, 2)]), Ok(()));
    let starved = edited(pod("p", 0, &[("i", Init, 5), ("m", App, 2)]), |allocation| {
        allocation.gpus[0].memory = MiB(2048)
    });
    check(starved, Err("of this GPU together"));
}

#[test]
fn a_pod_without_memory_on_paper_gets_no_gpu_that_is_full() {
    // A user who sets spec.nodeName bypasses the extender. Without admission policies, that user may write this annotation.
    for free in [
        edited(simple("thief", 0, 1), |allocation| {
            allocation.gpus[0].memory = MiB::ZERO;
            allocation
                .containers
                .values_mut()
                .for_each(|shares| shares[0].memory = MiB::ZERO);
        }),
        legacy(0, simple("thief", 0, 1)),
    ] {
        let mut node = Node::new(&[16384]);
        node.see(simple("q", 0, 16));
        node.admit("q").expect("admitted");
        node.start("q", "main").expect("started");
        node.kubelet_forgets("q");
        node.see(free);
        node.admit("thief").expect("admitted");
        let (reason, text) = node.start("thief", "main").expect_err("it asks for memory and has none");
        assert_eq!(reason, Reason::NoAllocation, "{text}");
        assert_eq!(node.specs.len(), 1, "only that of q");
    }
}

#[test]
fn gpushare_annotations_are_worth_what_its_extender_counts() {
    check(legacy(3, simple("p", 0, 3)), Ok(()));
    check(
        legacy(0, simple("p", 0, 3)),
        Err("give it 0 MiB of GPU GPU-0, but its containers request 3072 MiB"),
    );
    check(
        legacy(5, pod("p", 0, &[("a", App, 3), ("b", App, 3)])),
        Err("request 6144 MiB"),
    );
    // gpushare does not count init containers. The memory that they need in addition is booked all the same.
    let larger = legacy(2, pod("p", 0, &[("i", Init, 5), ("m", App, 2)]));
    check(larger.clone(), Ok(()));
    let mut node = Node::new(&[16384]);
    node.see(larger);
    node.admit("p").expect("admitted");
    node.start("p", "i").expect("started");
    let record = node.records.values().next().expect("a grant");
    assert_eq!(
        (record.gpus[0].memory, record.container_gpus[0].memory),
        (MiB(5120), MiB(5120))
    );
}

#[test]
fn a_running_pod_keeps_the_unit_of_its_first_grant() {
    let mut mib = settings();
    mib.unit = MemoryUnit::MIB;
    let gpus = vec![crate::node::gpu(0, 2048)];
    let mut node = Node::with(mib, gpus);
    let pod = edited(pod("p", 0, &[("a", App, 3), ("b", App, 2)]), |allocation| {
        allocation.gpus[0].memory = MiB(5);
        for (name, shares) in &mut allocation.containers {
            shares[0].memory = MiB(if name == "a" { 3 } else { 2 });
        }
    });
    node.see(pod);
    node.admit("p").expect("admitted");
    node.start("p", "a").expect("started");
    // The operator changes the unit, while the kubelet still has the devices that it handed out before.
    node.change_unit(MemoryUnit::GIB);
    node.start("p", "a").expect("it restarts");
    node.start("p", "b").expect("its second container starts");
}

/// Return a pod on GPU 0 with this many units of this many MiB, as the extender bound it.
fn in_unit(uid: &str, units: u64, mib: u64) -> Pod {
    edited(simple(uid, 0, units), |allocation| {
        allocation.gpus[0].memory = MiB(units * mib);
        for shares in allocation.containers.values_mut() {
            shares[0].memory = MiB(units * mib);
        }
    })
}

fn unit(mib: u64) -> MemoryUnit {
    MemoryUnit::new(mib).expect("not zero")
}

fn other_units(node: &Node) -> Vec<u64> {
    node.core.inventory().other_units.into_iter().map(MemoryUnit::mib).collect()
}

#[test]
fn the_inventory_names_other_units_while_their_grants_live() {
    let mut node = Node::new(&[16384]);
    node.see(in_unit("old", 3, 1024));
    node.admit("old").expect("admitted");
    node.start("old", "main").expect("started");
    assert_eq!(other_units(&node), [0; 0]);
    node.change_unit(unit(256));
    assert_eq!(other_units(&node), [1024]);
    node.see(in_unit("new", 8, 256));
    node.admit("new").expect("admitted");
    node.start("new", "main").expect("started");
    assert_eq!(other_units(&node), [1024]);
    node.object_gone("old");
    node.processes_end("old");
    node.reconcile();
    assert_eq!(other_units(&node), [0; 0]);
}

#[test]
fn a_container_is_told_all_numbers_in_the_unit_of_its_pod() {
    let mut node = Node::new(&[16384]);
    node.see(in_unit("old", 3, 1024));
    node.admit("old").expect("admitted");
    node.start("old", "main").expect("started");
    node.change_unit(unit(256));
    let again = node.start("old", "main").expect("it restarts");
    for line in ["ALIYUN_COM_GPU_MEM_POD=3", "ALIYUN_COM_GPU_MEM_DEV=16"] {
        assert!(again.env.contains(&line.to_owned()), "{:?}", again.env);
    }
    node.see(in_unit("new", 3, 256));
    node.admit("new").expect("admitted");
    let new = node.start("new", "main").expect("started");
    for line in ["ALIYUN_COM_GPU_MEM_POD=3", "ALIYUN_COM_GPU_MEM_DEV=64"] {
        assert!(new.env.contains(&line.to_owned()), "{:?}", new.env);
    }
}

/// 15109 MiB hold 59 units of 256 MiB (14.75 GiB), but only 14 units of 1 GiB.
#[test]
fn a_container_restarts_in_memory_that_the_unit_rounds_off() {
    let mut small = settings();
    small.unit = unit(256);
    let mut node = Node::with(small, vec![crate::node::gpu(0, 15109)]);
    for (uid, units) in [("a", 32), ("b", 27)] {
        node.see(in_unit(uid, units, 256));
        node.admit(uid).expect("admitted");
        node.start(uid, "main").expect("started");
    }
    node.change_unit(MemoryUnit::GIB);
    for uid in ["a", "b"] {
        node.start(uid, "main").expect("it restarts");
    }
    let events: Vec<_> = node.reconcile().actions;
    assert!(!format!("{events:?}").contains("Overcommitted"), "{events:?}");
}

/// The pod is bound before the unit is made smaller, and starts after that.
#[test]
fn a_bound_pod_keeps_its_unit_when_the_unit_shrinks() {
    let mut node = Node::new(&[16384]);
    for uid in ["runs", "pulls"] {
        node.see(in_unit(uid, 3, 1024));
        node.admit(uid).expect("admitted");
    }
    node.start("runs", "main").expect("started");
    node.change_unit(unit(256));
    let late = node.start("pulls", "main").expect("its image has come");
    assert!(late.env.contains(&"ALIYUN_COM_GPU_MEM_POD=3".to_owned()), "{:?}", late.env);
    assert!(node.records.values().all(|record| record.unit == MemoryUnit::GIB));
}

/// A pod that claims an earlier, smaller unit would book less memory than its devices stand for.
#[test]
fn a_smaller_unit_is_not_believed_of_a_pod_that_has_no_grant() {
    let mut small = settings();
    small.unit = unit(256);
    let mut node = Node::with(small, vec![crate::node::gpu(0, 16384)]);
    node.see(in_unit("runs", 8, 256));
    node.admit("runs").expect("admitted");
    node.start("runs", "main").expect("started");
    node.change_unit(MemoryUnit::GIB);
    node.see(in_unit("forged", 4, 256));
    node.admit("forged").expect("admitted");
    let (reason, text) = node.start("forged", "main").expect_err("4 devices of 1 GiB for 1 GiB");
    assert_eq!(reason, Reason::NoAllocation);
    assert!(text.contains("--memory-unit was changed after the pod was bound"), "{text}");
}

/// gpushare's annotation names an index, and another card may have that index now.
#[test]
fn a_gpushare_pod_keeps_the_card_of_its_first_grant() {
    for restarted in [false, true] {
        let mut node = Node::new(&[16384]);
        node.see(legacy(5, pod("p", 0, &[("a", App, 3), ("b", App, 2)])));
        node.admit("p").expect("admitted");
        node.start("p", "a").expect("started");
        node.replace_card(0, "GPU-new");
        if restarted {
            node.restart_agent();
        }
        // The container that was there before and the first one now get the same answer.
        for container in ["a", "b"] {
            let (reason, text) = node.start("p", container).expect_err("its card is gone");
            assert_eq!(reason, Reason::GpuUnavailable, "{restarted}: {text}");
            assert!(text.contains("GPU-0, which this node does not have now"), "{text}");
        }
        assert!(node.events.iter().all(|(_, reason, _)| *reason != "AllocationChanged"));
        node.replace_card(0, "GPU-0");
        node.start("p", "b").expect("its card is back");
    }
}
