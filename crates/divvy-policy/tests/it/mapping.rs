//! Tests of the translation of the ledger's nodes for the policies.

use divvy_model::{Health, MiB};
use divvy_placement::Ledger;
use divvy_policy::{Demand, DemandShare, GpuGroup, ModelSet, Models, Placer, Policy, demand_of, from_ledger, rank};

use crate::fixture::*;

fn groups(ledger: &Ledger, node: &str) -> Vec<GpuGroup> {
    from_ledger(&ledger.node(node).expect("known"), &mut Models::default())
}

fn left(group: &GpuGroup) -> Vec<u32> {
    group.free.gpus[..usize::from(group.shape.gpus)].to_vec()
}

#[test]
fn gpus_of_one_size_are_a_group_and_failed_ones_are_in_none() {
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n", &[24, 80, 24, 24]);
    edit_gpu(&mut node, 3, |gpu| gpu.health = Health::Failed);
    edit_gpu(&mut node, 1, |gpu| gpu.held = MiB(1024));
    ledger.apply_node(&node);
    ledger.apply_pod(divvy_pod("a", "n", 2, 4));
    let groups = groups(&ledger, "n");
    let found: Vec<_> = groups
        .iter()
        .map(|group| (group.shape.gpu_size >> 10, group.positions.clone(), left(group)))
        .collect();
    assert_eq!(
        found,
        [(24, vec![0, 2], vec![24 << 10, 20 << 10]), (80, vec![1], vec![79 << 10])]
    );
    assert_eq!(groups[0].free.kinds[0], 1, "one pod with a part of a GPU");
    assert_eq!(groups[1].free.kinds, [0; 17]);
}

#[test]
fn a_node_that_is_not_offered_has_no_groups() {
    let ledger = fixture();
    assert_eq!(groups(&ledger, "n3"), []);
}

#[test]
fn more_gpus_than_a_group_can_hold_are_several_groups() {
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&gpushare_node("big", 40 * 16, 40));
    let sizes: Vec<_> = groups(&ledger, "big").iter().map(|group| group.shape.gpus).collect();
    assert_eq!(sizes, [16, 16, 8]);
}

#[test]
fn cpu_and_main_memory_are_what_the_nodes_pods_leave() {
    let mut ledger = Ledger::new(GIB);
    let mut node = gpushare_node("n", 32, 2);
    (node.cpu_milli, node.memory_bytes) = (8000, 64 << 30);
    ledger.apply_node(&node);
    let mut pod = gpushare_pod("a", "n", 0, 10);
    (pod.cpu_milli, pod.memory_bytes) = (1500, (1 << 30) + 1);
    let demand = demand_of(&pod, &ask(10)).expect("countable");
    ledger.apply_pod(pod);
    let free = groups(&ledger, "n")[0].free;
    assert_eq!((free.cpu_milli, free.memory_mib), (6500, (63 << 10) - 1));
    let asked = (demand.cpu_milli, demand.memory_mib, demand.gpus, demand.share);
    assert_eq!(asked, (1500, 1025, 1, DemandShare::Memory(10 << 10)));
}

#[test]
fn what_fits_in_the_ledger_fits_here_to_the_last_mib() {
    // Thirds of a GPU: in thousandths, the third one would not fit any longer.
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&gpushare_node("n", 24, 1));
    let demand = Demand {
        cpu_milli: 0,
        memory_mib: 0,
        gpus: 1,
        share: DemandShare::Memory(8 << 10),
        models: ModelSet::ANY,
    };
    for placed in 0..4 {
        let group = groups(&ledger, "n").remove(0);
        let fits = ledger.fits("n", &ask(8), "u").is_ok();
        assert_eq!(group.free.fits(&group.shape, &demand), fits, "{placed} placed");
        assert_eq!(fits, placed < 3);
        let mut placer = Placer::new(Policy::Fgd);
        placer.add(group.shape, group.free, rank("n"));
        assert_eq!(placer.decide(&demand, 0).is_some(), fits);
        ledger.apply_pod(gpushare_pod(&format!("p{placed}"), "n", 0, 8));
    }
}
