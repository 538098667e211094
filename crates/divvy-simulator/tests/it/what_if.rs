//! Tests of placing a cluster's pods again.

use std::collections::BTreeMap;

use divvy_model::{Health, MemoryUnit, MiB, Node, Pod};
use divvy_policy::Policy;
use divvy_simulator::what_if::{ClusterNode, ClusterPod, CurrentCluster, SimulatedChange, WhatIfOutcome, asking, what_if};
use divvy_testkit::nodes::{divvy_node, divvy_pod, edit_gpu, pending};
use proptest::prelude::*;

/// A node whose GPUs have these sizes in MiB and these products.
fn node(name: &str, gpus: &[(&str, u64)]) -> ClusterNode {
    let units: Vec<u64> = gpus.iter().map(|(_, mib)| mib / 1024).collect();
    let mut node = divvy_node(name, &units);
    for (index, (model, mib)) in gpus.iter().enumerate() {
        edit_gpu(&mut node, index, |gpu| {
            gpu.model = (*model).to_owned();
            gpu.total = MiB(*mib);
        });
    }
    ClusterNode {
        node: Node {
            cpu_milli: 16_000,
            memory_bytes: 1 << 36,
            pods: 110,
            ..node
        },
        labels: BTreeMap::new(),
    }
}

/// A pod that requests this many units. The order of the names is also the order of creation.
fn pod(name: &str, units: u64) -> ClusterPod {
    ClusterPod {
        pod: Pod {
            namespace: "ns".to_owned(),
            cpu_milli: 1000,
            ..pending(name, units)
        },
        ..ClusterPod::default()
    }
}

/// The same pod, running on this GPU of this node.
fn on(node: &str, index: usize, pod: ClusterPod) -> ClusterPod {
    let bound = divvy_pod(&pod.pod.name, node, index, pod.pod.request.containers[0].units);
    ClusterPod {
        pod: Pod {
            node: bound.node,
            phase: bound.phase,
            container_running: true,
            held: bound.held,
            ..pod.pod
        },
        ..pod
    }
}

fn cluster(nodes: Vec<ClusterNode>, pods: Vec<ClusterPod>) -> CurrentCluster {
    CurrentCluster {
        unit: MemoryUnit::GIB,
        nodes,
        pods,
    }
}

/// A cluster with two half-full GPUs, and a pod that requests a whole one.
fn scattered() -> CurrentCluster {
    let nodes = vec![node("n1", &[("T4", 16_384)]), node("n2", &[("T4", 16_384)])];
    cluster(nodes, vec![on("n1", 0, pod("a", 8)), on("n2", 0, pod("b", 8)), pod("c", 16)])
}

const AS_IT_IS: SimulatedChange = SimulatedChange {
    policy: Policy::BestFit,
    unit: None,
    add: None,
    keep_bound: false,
};

fn names(keys: &[divvy_model::PodKey]) -> Vec<&str> {
    keys.iter().map(|key| key.name.as_str()).collect()
}

fn fits(outcome: &WhatIfOutcome) -> (Vec<&str>, Vec<&str>, Vec<&str>) {
    (
        names(&outcome.would_fit),
        names(&outcome.would_wait),
        names(&outcome.would_not_fit),
    )
}

#[test]
fn waiting_pods_fit_when_all_are_placed_anew() {
    let cluster = scattered();
    assert_eq!(asking(&cluster), (2, 1));
    let outcome = what_if(&cluster, &AS_IT_IS).expect("a cluster");
    let before = outcome.now;
    assert_eq!((before.placed, before.used, before.idle_gpus), (2, MiB(16_384), 0));
    assert_eq!(fits(&outcome), (vec!["c"], vec![], vec![]));
    assert_eq!((outcome.replayed, outcome.moved, outcome.then.used), (3, 1, MiB(32_768)));
}

/// An additional node makes room.
#[test]
fn staying_pods_leave_the_room_scattered() {
    let keep = SimulatedChange {
        keep_bound: true,
        ..AS_IT_IS
    };
    let outcome = what_if(&scattered(), &keep).expect("a cluster");
    assert_eq!(fits(&outcome), (vec![], vec!["c"], vec![]));
    assert_eq!((outcome.replayed, outcome.moved), (1, 0));
    for like in [None, Some("n2".to_owned())] {
        let more = SimulatedChange {
            add: Some((1, like)),
            ..keep.clone()
        };
        let outcome = what_if(&scattered(), &more).expect("a cluster");
        assert_eq!(fits(&outcome), (vec!["c"], vec![], vec![]));
        assert_eq!((outcome.then.nodes, outcome.then.memory), (3, MiB(3 * 16_384)));
    }
    let error = what_if(
        &scattered(),
        &SimulatedChange {
            add: Some((1, Some("n9".to_owned()))),
            ..AS_IT_IS
        },
    );
    let error = error.expect_err("no such node").to_string();
    assert_eq!(error, "there is no node n9 to copy; nodes with GPUs are n1, n2");
}

/// Apart from the rounding, pods request the same memory in every unit.
#[test]
fn other_units_round_requests_up_and_gpus_down() {
    // 15.9 GiB are 15 units of 1 GiB, 63 of 256 MiB, or 3 of 4 GiB.
    let nodes = vec![node("n1", &[("T4", 16_300)])];
    let pods = || (0..4).map(|number| pod(&format!("p{number}"), 4)).collect();
    let with = |unit: Option<u64>| {
        let change = SimulatedChange {
            unit: unit.and_then(MemoryUnit::new),
            ..AS_IT_IS
        };
        what_if(&cluster(nodes.clone(), pods()), &change).expect("a cluster")
    };
    let (now, small, large) = (with(None), with(Some(256)), with(Some(4096)));
    assert_eq!([&now, &small, &large].map(|of| of.would_fit.len()), [3, 3, 3]);
    assert_eq!(
        [&now, &small, &large].map(|of| of.then.memory),
        [MiB(15_360), MiB(16_128), MiB(12_288)]
    );
    let rounded = what_if(
        &cluster(nodes.clone(), vec![pod("a", 5), pod("b", 5)]),
        &SimulatedChange {
            unit: MemoryUnit::new(4096),
            ..AS_IT_IS
        },
    );
    let rounded = rounded.expect("a cluster");
    assert_eq!(
        (rounded.would_fit.len(), rounded.then.used),
        (1, MiB(8192)),
        "5 GiB are two units of 4"
    );
}

#[test]
fn what_keeps_pods_from_nodes_keeps_them_from_nodes_here() {
    let two = |edit: &dyn Fn(&mut ClusterNode)| {
        let mut nodes = vec![node("n1", &[("T4", 16_384)]), node("n2", &[("T4", 16_384)])];
        edit(&mut nodes[0]);
        nodes
    };
    let pods = || vec![pod("a", 12), pod("b", 12)];
    let of = |nodes, pods| what_if(&cluster(nodes, pods), &AS_IT_IS).expect("a cluster");
    assert_eq!(of(two(&|_| {}), pods()).would_fit.len(), 2);
    for (what, edit) in [
        (
            "cordoned",
            &(|node: &mut ClusterNode| node.node.unschedulable = true) as &dyn Fn(&mut ClusterNode),
        ),
        ("CPU", &|node: &mut ClusterNode| node.node.cpu_milli = 500),
        ("main memory", &|node: &mut ClusterNode| node.node.memory_bytes = 0),
        ("GPU", &|node: &mut ClusterNode| {
            if let Some(Ok(inventory)) = &mut node.node.inventory {
                inventory.gpus[0].health = Health::Failed;
            }
        }),
    ] {
        let needs_memory = pods().into_iter().map(|pod| ClusterPod {
            pod: Pod {
                memory_bytes: 1 << 20,
                ..pod.pod
            },
            ..pod
        });
        assert_eq!(of(two(edit), needs_memory.collect()).would_fit.len(), 1, "{what}");
    }
    let one_pod = |node: &mut ClusterNode| node.node.pods = 1;
    let small = vec![pod("a", 1), pod("b", 1), pod("c", 1)];
    assert_eq!(of(two(&one_pod)[..1].to_vec(), small).would_fit.len(), 1, "pods");
    let mut selective = pods();
    for pod in &mut selective {
        pod.selector = BTreeMap::from([("disk".to_owned(), "ssd".to_owned())]);
    }
    let labelled = |node: &mut ClusterNode| node.labels = BTreeMap::from([("disk".to_owned(), "ssd".to_owned())]);
    assert_eq!(names(&of(two(&labelled), selective).would_fit), ["a"]);
}

#[test]
fn gpus_of_different_products_on_one_node_share_its_cpu() {
    let mut mixed = node("n1", &[("T4", 16_384), ("A10", 24_576)]);
    mixed.node.cpu_milli = 1500;
    let outcome = what_if(&cluster(vec![mixed], vec![pod("a", 4), pod("b", 4)]), &AS_IT_IS).expect("a cluster");
    assert_eq!(fits(&outcome), (vec!["a"], vec!["b"], vec![]));
}

/// Pods that are being deleted also stay and keep their memory.
#[test]
fn pods_on_cordoned_nodes_stay_and_keep_memory() {
    let mut cluster = scattered();
    cluster.pods[0].pod.deleting = true;
    cluster.nodes[1].node.unschedulable = true;
    let outcome = what_if(&cluster, &AS_IT_IS).expect("a cluster");
    assert_eq!(fits(&outcome), (vec![], vec!["c"], vec![]));
    assert_eq!((outcome.stayed, outcome.moved, outcome.then.placed), (2, 0, 2));
}

#[test]
fn a_cluster_without_gpu_memory_is_refused_with_what_to_look_at() {
    let error = what_if(&cluster(vec![], vec![pod("a", 1)]), &AS_IT_IS)
        .expect_err("nothing")
        .to_string();
    assert!(
        error.contains("no node of the cluster offers aliyun.com/gpu-mem") && error.contains("kubectl get nodes"),
        "{error}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Every pod is reported once, and the order of the lists does not matter.
    #[test]
    fn no_memory_is_promised_twice(
        nodes in prop::collection::vec((1..4_usize, 0..2_usize, any::<bool>()), 1..6),
        pods in prop::collection::vec((0..20_u64, 0..4_u64), 0..24),
        unit in prop::option::of(prop::sample::select(vec![256_u64, 1024, 3000])),
        keep_bound: bool,
    ) {
        let nodes: Vec<ClusterNode> = nodes.iter().enumerate().map(|(number, (gpus, model, cordoned))| {
            let gpu = [("T4", 16_000), ("A100", 40_000)][*model];
            let mut node = node(&format!("n{number}"), &vec![gpu; *gpus]);
            node.node.unschedulable = *cordoned && number > 0;
            node
        }).collect();
        let pods: Vec<ClusterPod> = pods.iter().enumerate().map(|(number, (units, created))| ClusterPod {
            created: *created as i64,
            ..pod(&format!("p{number}"), *units)
        }).collect();
        let cluster = cluster(nodes, pods);
        let mut reversed = cluster.clone();
        reversed.nodes.reverse();
        reversed.pods.reverse();
        for policy in Policy::ALL {
            let change = SimulatedChange { policy, unit: unit.and_then(MemoryUnit::new), add: None, keep_bound };
            let outcome = what_if(&cluster, &change).expect("a cluster");
            prop_assert!(outcome.then.used <= outcome.then.memory);
            let (_, waiting) = asking(&cluster);
            prop_assert_eq!(outcome.replayed, waiting);
            prop_assert_eq!(outcome.would_fit.len() as u64, outcome.then.placed);
            prop_assert_eq!((outcome.would_fit.len() + outcome.would_wait.len()) as u64, waiting);
            prop_assert_eq!(outcome, what_if(&reversed, &change).expect("a cluster"), "{}", policy);
        }
    }
}
