//! How many heap allocations a decision makes, and how much memory a pod in the ledger takes.

use std::collections::BTreeMap;

use divvy_model::legacy::LegacyAllocation;
use divvy_model::{
    Allocation, ContainerKind, ContainerRequest, ContainerShare, GpuShare, Held, MemoryUnit, MiB, Phase, Pod, PodRequest,
};
use divvy_placement::Ledger;
use divvy_policy::Policy;

#[path = "../../benches/cluster/mod.rs"]
mod cluster;

use cluster::Cluster;

/// Learning about a pod, deciding about it, and taking its place make no heap allocations. There are exceptions: about once in 30
/// arrivals the prices are computed again, and more rarely the mix is fitted or a table of known states grows.
#[test]
fn decisions_about_known_pod_kinds_allocate_nothing() {
    for policy in [Policy::Divvy, Policy::Fgd] {
        let mut cluster = Cluster::new(policy, 120, false);
        cluster.fill();
        cluster.placer = cluster.cold(policy);
        let mut turn = || {
            cluster.end();
            let demand = cluster.pod();
            let used = allocation_counter::measure(|| {
                cluster.arrive(&demand);
            });
            used.count_total
        };
        for _ in 0..500 {
            turn();
        }
        let allocating = (0..1000).filter(|_| turn() > 0).count();
        assert!(allocating <= 50, "{policy}: {allocating} of 1000 decisions allocated memory");
    }
}

const UUID: &str = "GPU-00000000-0000-4000-8000-000000000000";

/// A pod as in a large cluster: what the ledger keeps of 3.9 KB of JSON.
fn pod(i: usize, containers: usize, units: u64, held: Held) -> Pod {
    let container = |number: usize| ContainerRequest {
        name: format!("container-{number}"),
        kind: ContainerKind::App,
        units: if number == 0 { units } else { 0 },
        gpu_count: 0,
    };
    Pod {
        uid: format!("{i:08x}-0000-4000-8000-{i:012x}"),
        namespace: "team-a".to_owned(),
        name: format!("trainer-7c9d8b6f5d-{i}"),
        node: Some(format!("gpu-node-{:05}.cluster.example", i / 10)),
        phase: Phase::Running,
        container_running: true,
        request: PodRequest::new((0..containers).map(container).collect(), None),
        cpu_milli: 2_000,
        memory_bytes: 8 << 30,
        held,
        ..Pod::default()
    }
}

fn legacy() -> Held {
    Held::Legacy(LegacyAllocation {
        gpus: BTreeMap::from([(0, 4)]),
    })
}

fn allocation() -> Held {
    let share = ContainerShare {
        uuid: UUID.to_owned(),
        memory: MiB(4096),
        cores: 0,
    };
    Held::Allocation(Allocation {
        v: 1,
        gpus: vec![GpuShare {
            uuid: UUID.to_owned(),
            memory: MiB(4096),
            cores: 0,
            whole: false,
            enforcement: None,
        }],
        containers: BTreeMap::from([("container-0".to_owned(), vec![share])]),
    })
}

/// 50,000 pods must fit into the 200 MiB of the extender, next to everything else. A pod that requests nothing takes the same
/// memory, however many containers it has.
#[test]
fn a_bound_pod_costs_a_few_hundred_bytes() {
    const PODS: usize = 5_000;
    for (what, containers, units, held, budget) in [
        ("with gpushare's annotations", 2, 4, legacy(), 750),
        ("with an allocation", 2, 4, allocation(), 700),
        ("that asks for nothing", 2, 0, Held::Nothing, 550),
        ("that asks for nothing, of many containers", 200, 0, Held::Nothing, 550),
    ] {
        let mut ledger = Ledger::new(MemoryUnit::GIB);
        let used = allocation_counter::measure(|| {
            ledger.replace_pods((0..PODS).map(|i| pod(i, containers, units, held.clone())));
        });
        assert_eq!(ledger.pod_count(), PODS);
        let each = used.bytes_current / PODS as i64;
        assert!(each <= budget, "a pod {what} costs {each} bytes, of {budget}");
        assert!(each > 100, "{each} bytes: nothing was counted");
    }
}
