//! What is free on a GPU, compared with the ledger.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::legacy::LegacyAllocation;
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, Gpu, GpuShare, Health, Held, Inventory, MemoryUnit, MiB, Node, Partition, Phase,
    Pod, PodRequest, Vendor, WholeContainer, WholeKind, WholeRequest,
};
use divvy_placement::{Ask, Ledger, parts};
use divvy_testkit::nodes::{amd_pending, divvy_node, divvy_pod, edit_gpu, gpushare_node, gpushare_pod, offer_whole, pending};
use divvy_view::{NodeView, amounts};
use proptest::prelude::*;

const UNITS: [u64; 3] = [1024, 256, 1];

fn mig() -> WholeKind {
    WholeKind::of_resource("nvidia.com/mig-1g.5gb").expect("a MIG profile")
}

/// One GPU of an inventory. The last two have the same index, as after a card was replaced.
fn any_gpu(index: u32, unit: MemoryUnit) -> impl Strategy<Value = Gpu> {
    let memory = (1..24_000_u64, 0..2000_u64);
    let held = prop_oneof![3 => Just(0), 1 => 1..24_000_u64, 1 => Just(u64::MAX)];
    let health = prop_oneof![
        5 => Just(Health::Ok), 1 => Just(Health::Failed), 1 => Just(Health::Lost), 1 => Just(Health::Testing)
    ];
    (memory, held, health, 0..7_u8).prop_map(move |((total, reserve), held, health, kind)| {
        let node = divvy_node("n", &[0]);
        let Some(Ok(inventory)) = node.inventory else {
            unreachable!("the node has an inventory")
        };
        let mut gpu = inventory.gpus.into_iter().next().expect("one GPU");
        gpu.index = index.min(2);
        gpu.uuid = format!("GPU-{index}");
        gpu.total = MiB(total);
        gpu.reserve = MiB(reserve.min(total));
        gpu.units = gpu.units_of(unit);
        gpu.held = MiB(held);
        gpu.health = health;
        match kind {
            0 => (gpu.vendor, gpu.whole, gpu.units) = (Vendor::Amd, Some(Vendor::Amd.into()), 0),
            1 => (gpu.whole, gpu.units) = (Some(mig()), 0),
            2 => gpu.whole = Some(Vendor::Nvidia.into()),
            _ => {}
        }
        gpu.partition = matches!(kind, 1 | 3).then(|| Partition {
            parent: "GPU-parent".to_owned(),
            profile: "1g.5gb".to_owned(),
        });
        gpu
    })
}

/// A node, and the unit that the cluster counts in.
fn any_node() -> impl Strategy<Value = (Node, MemoryUnit)> {
    let unit = proptest::sample::select(&UNITS).prop_map(|mib| MemoryUnit::new(mib).expect("not 0"));
    unit.prop_flat_map(|unit| {
        let gpus = (0..4_u32).map(|index| any_gpu(index, unit)).collect::<Vec<_>>();
        let gpus = gpus.prop_shuffle();
        let others = proptest::sample::subsequence(UNITS.to_vec(), 0..3);
        let inventory = (gpus, 0..5_usize, others, any::<bool>()).prop_map(move |(mut gpus, count, others, unschedulable)| {
            gpus.truncate(count);
            Inventory {
                unit,
                other_units: others
                    .into_iter()
                    .filter_map(MemoryUnit::new)
                    .filter(|of| *of != unit)
                    .collect(),
                unschedulable,
                gpus,
                ..inventory()
            }
        });
        let agent = (
            inventory,
            prop_oneof![4 => Just(None), 1 => (0..60_u64, 0..5_u64).prop_map(Some)],
        )
            .prop_map(move |(inventory, capacity)| {
                let all = (inventory.total_units(), inventory.gpus.len() as u64);
                let (units, gpus) = capacity.unwrap_or(all);
                (
                    Node {
                        inventory: Some(Ok(inventory)),
                        ..offering(units, gpus)
                    },
                    unit,
                )
            });
        let without = (0..60_u64, 0..5_u64, any::<bool>()).prop_map(|(units, gpus, broken)| {
            let inventory = broken.then(|| Inventory::parse("broken"));
            (
                Node {
                    inventory,
                    ..offering(units, gpus)
                },
                MemoryUnit::GIB,
            )
        });
        prop_oneof![4 => agent, 1 => without]
    })
}

fn inventory() -> Inventory {
    match divvy_node("n", &[]).inventory {
        Some(Ok(inventory)) => inventory,
        _ => unreachable!("the node has an inventory"),
    }
}

fn offering(units: u64, gpus: u64) -> Node {
    Node {
        allocatable_units: units,
        allocatable_gpus: gpus,
        ..gpushare_node("n", units, gpus)
    }
}

fn any_held() -> impl Strategy<Value = Held> {
    let memory = || prop_oneof![6 => 0..12_000_u64, 4 => (0..12_u64).prop_map(|gib| gib * 1024), 1 => Just(u64::MAX)];
    let whole = proptest::bool::weighted(0.2);
    // GPU 4 is on no node.
    let shares = proptest::collection::btree_map(0..5_u32, (memory(), 0..101_u32, whole), 0..3);
    let ours = shares.prop_map(|shares| {
        let share = |(index, (memory, cores, whole)): (u32, (u64, u32, bool))| GpuShare {
            uuid: format!("GPU-{index}"),
            memory: MiB(memory),
            cores,
            whole,
            enforcement: None,
        };
        Held::Allocation(Allocation {
            v: 1,
            gpus: shares.into_iter().map(share).collect(),
            containers: BTreeMap::new(),
        })
    });
    let units = prop_oneof![8 => 0..12_u64, 1 => Just(u64::MAX)];
    let gpushares = proptest::collection::btree_map(0..5_u32, units, 1..3);
    let gpushares = gpushares.prop_map(|gpus| Held::Legacy(LegacyAllocation { gpus }));
    let unreadable = Just(Held::Unreadable(Allocation::parse("broken").expect_err("no JSON")));
    prop_oneof![5 => ours, 3 => gpushares, 1 => unreadable, 1 => Just(Held::Nothing)]
}

fn any_request() -> impl Strategy<Value = PodRequest> {
    let kind = proptest::sample::select(&[ContainerKind::App, ContainerKind::Init, ContainerKind::Sidecar][..]);
    let containers = proptest::collection::vec((kind, prop_oneof![9 => 0..12_u64, 1 => Just(u64::MAX)]), 0..3);
    let wholes = [mig(), Vendor::Amd.into(), Vendor::Nvidia.into()];
    let whole = proptest::option::weighted(0.3, (proptest::sample::select(wholes.to_vec()), 1..4_u64));
    (containers, whole).prop_map(|(containers, whole)| {
        let container = |(kind, units)| ContainerRequest {
            name: "c".to_owned(),
            kind,
            units,
            gpu_count: 0,
        };
        let whole = whole.map(|(kind, gpus)| WholeRequest {
            kind,
            containers: vec![WholeContainer {
                name: "c".to_owned(),
                kind: ContainerKind::App,
                gpus,
            }],
        });
        PodRequest::with_whole(
            containers.into_iter().map(container).collect(),
            whole.into_iter().collect(),
            None,
        )
    })
}

fn any_pods() -> impl Strategy<Value = Vec<Pod>> {
    let phase = prop_oneof![6 => Just(Phase::Running), 1 => Just(Phase::Pending), 1 => Just(Phase::Failed)];
    let pod = (any_held(), any_request(), phase, any::<bool>());
    proptest::collection::vec(pod, 0..5).prop_map(|pods| {
        let pods = pods.into_iter().enumerate();
        let pod = |(at, (held, request, phase, container_running)): (usize, (Held, PodRequest, Phase, bool))| Pod {
            node: Some("n".to_owned()),
            held,
            request,
            phase,
            container_running,
            ..pending(&format!("p{at}"), 0)
        };
        pods.map(pod).collect()
    })
}

/// Return the node as the view shows it, and the ledger that the extender and `divvy why` have of it.
fn both(node: &Node, unit: MemoryUnit, pods: &[Pod]) -> (Option<NodeView>, Ledger) {
    let mut ledger = Ledger::new(unit);
    ledger.apply_node(node);
    for pod in pods {
        ledger.apply_pod(pod.clone());
    }
    let shown: Vec<Pod> = pods.iter().cloned().filter_map(divvy_view::shown).collect();
    (NodeView::of(node.clone(), &shown), ledger)
}

/// Return the pods that hold memory of a GPU, with the amount in MiB.
type Holders = BTreeSet<(String, u64)>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_free_and_who_holds_the_rest_is_what_the_ledger_says((node, unit) in any_node(), pods in any_pods()) {
        let (shown, ledger) = both(&node, unit, &pods);
        let entry = ledger.node("n").expect("known");
        let state = entry.state().expect("known");
        let Some(shown) = shown else {
            prop_assert!(node.allocatable_units == 0 && state.gpus.is_empty());
            return Ok(());
        };
        if !state.gpus.is_empty() {
            prop_assert_eq!(shown.gpus.len(), state.gpus.len());
        }
        for (position, gpu) in state.gpus.iter().enumerate() {
            let of = &shown.gpus[position];
            prop_assert_eq!((&of.uuid, of.index), (&gpu.uuid, gpu.index));
            prop_assert_eq!(of.free, entry.free(position), "GPU {}", position);
            let rows: Holders = of.pods.iter().map(|pod| (pod.uid.clone(), pod.memory.0)).filter(|(_, mib)| *mib > 0).collect();
            let holders: Holders = entry.holders(position).into_iter().map(|holder| (holder.uid, holder.memory.0)).collect();
            prop_assert_eq!(rows, holders, "GPU {}", position);
        }
        // What `divvy why` prints.
        for report in ledger.explain("n", &Ask::new(1, unit)).gpus {
            let same = shown.gpus.iter().find(|gpu| gpu.uuid == report.uuid && gpu.index == report.index);
            prop_assert_eq!(same.map(|gpu| gpu.free), Some(report.free));
        }
    }

    /// The sum is not the total for a GPU that is overbooked.
    #[test]
    fn allocated_held_and_free_memory_make_the_total((node, unit) in any_node(), pods in any_pods()) {
        let (shown, ledger) = both(&node, unit, &pods);
        let Some(shown) = shown else { return Ok(()) };
        let entry = ledger.node("n").expect("known");
        let state = entry.state().expect("known");
        let parts_anywhere = pods.iter().filter(|pod| !pod.ended()).any(|pod| {
            parts::of_pod(pod, state, unit).iter().any(|part| part.is_anywhere(&pod.held, state))
        });
        for (position, gpu) in state.gpus.iter().enumerate() {
            let of = amounts::of_gpu(&shown, &shown.gpus[position], None);
            let pods = shown.gpus[position].pods.iter().map(|pod| amounts::of_pod(&shown, &shown.gpus[position], pod, None).allocated);
            prop_assert_eq!(of.allocated, pods.fold(0, u64::saturating_add));
            let is_overbooked = entry.used(position).saturating_add(gpu.held) > gpu.capacity;
            // A GPU that is only offered as a whole has no units, and the kubelet may offer other units than the inventory lists.
            let same = unit.memory(shown.gpus[position].total) == Some(gpu.capacity);
            if same && !is_overbooked && !parts_anywhere {
                prop_assert_eq!(of.free, shown.gpus[position].free.0 << 20);
                prop_assert_eq!(of.allocated + of.held + of.free, of.total, "GPU {}: {:?}", position, of);
            } else {
                prop_assert!(of.held + of.free <= of.total.saturating_sub(of.allocated), "GPU {}: {:?}", position, of);
            }
        }
        let of = amounts::of_node(&shown, None);
        prop_assert!(of.held + of.free <= of.total.saturating_sub(of.allocated), "{:?}", of);
        prop_assert!(shown.free() <= shown.total.saturating_sub(shown.allocated));
    }
}

/// The free memory of each GPU in GiB as the view shows it, and the numbers of pods on the GPUs and of pending pods.
type Summary = (Vec<u64>, usize, usize);

fn summary(node: &Node, pods: &[Pod]) -> Summary {
    let (shown, _) = both(node, MemoryUnit::GIB, pods);
    let shown = shown.expect("the node is shown");
    let on = |node: &NodeView| node.gpus.iter().map(|gpu| gpu.pods.len()).sum();
    (
        shown.gpus.iter().map(|gpu| gpu.free.0 / 1024).collect(),
        on(&shown),
        shown.pending.len(),
    )
}

#[test]
fn each_way_in_which_a_pod_takes_memory_is_counted() {
    let shared = || Node {
        allocatable_units: 32,
        allocatable_gpus: 2,
        ..divvy_node("n", &[16, 16])
    };
    let held = || {
        let mut node = shared();
        edit_gpu(&mut node, 0, |gpu| gpu.held = MiB(4096));
        node
    };
    let both_ways = || {
        let mut node = shared();
        offer_whole(&mut node);
        node
    };
    let asks_for_nothing = Pod {
        request: PodRequest::default(),
        ..divvy_pod("a", "n", 0, 3)
    };
    let whole = Pod {
        request: divvy_testkit::nodes::whole_request(Vendor::Nvidia, &[(ContainerKind::App, 1)]),
        ..divvy_pod("a", "n", 1, 1)
    };
    let gone = divvy_pod("a", "n", 7, 3);
    let changed = || {
        let mut node = shared();
        if let Some(Ok(inventory)) = &mut node.inventory {
            inventory.other_units = MemoryUnit::new(256).into_iter().collect();
        }
        node
    };
    let asks_for_more = || Pod {
        request: divvy_testkit::nodes::request(&[12]),
        ..divvy_pod("a", "n", 0, 3)
    };
    let bound = |pod: Pod| Pod {
        node: Some("n".to_owned()),
        ..pod
    };
    let cases: [(&str, Node, Pod, Summary); 10] = [
        ("an allocation", shared(), divvy_pod("a", "n", 0, 3), (vec![13, 16], 1, 0)),
        (
            "containers of deleted pods",
            held(),
            divvy_pod("a", "n", 0, 3),
            (vec![9, 16], 1, 0),
        ),
        (
            "a request above the allocation",
            shared(),
            asks_for_more(),
            (vec![4, 16], 1, 0),
        ),
        (
            "a request in the former unit",
            changed(),
            asks_for_more(),
            (vec![13, 16], 1, 0),
        ),
        ("no request", shared(), asks_for_nothing, (vec![13, 16], 1, 0)),
        ("a whole GPU", both_ways(), whole, (vec![16, 0], 1, 0)),
        ("a GPU that is gone", shared(), gone.clone(), (vec![16, 16], 0, 1)),
        ("a UUID where none is known", offering(32, 2), gone, (vec![13, 13], 0, 1)),
        (
            "gpushare's annotations",
            offering(32, 2),
            gpushare_pod("a", "n", 1, 5),
            (vec![16, 11], 1, 0),
        ),
        ("no annotations", shared(), bound(pending("a", 5)), (vec![16, 16], 0, 1)),
    ];
    for (name, node, pod, expected) in cases {
        assert_eq!(summary(&node, &[pod]), expected, "{name}");
    }
    // A node that gpushare's division leaves a remainder on, which no ledger offers, is shown as before.
    assert_eq!(
        summary(&offering(31, 2), &[gpushare_pod("a", "n", 0, 5)]),
        (vec![10, 15], 1, 0)
    );
    let (shown, _) = both(&both_ways(), MemoryUnit::GIB, &[bound(amd_pending("a", 1))]);
    assert_eq!(
        shown.expect("the node is shown").unnamed,
        [],
        "another device plugin offers amd.com/gpu"
    );
}
