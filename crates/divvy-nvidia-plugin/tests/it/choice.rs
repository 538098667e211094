use divvy_model::{GpuLink, LinkKind};
use divvy_nvidia_config::SharedDevicesPolicy::{self, Distributed, Packed};
use divvy_nvidia_config::{NvidiaMigStrategy, SharingStrategy};
use divvy_nvidia_plugin::{OfferedResource, PluginMachine};

use crate::build::{config, divided, ids, linked, machine, mig, resource, share, u};

/// The numbers of the chosen GPUs, in ascending order.
fn chosen(machine: &PluginMachine, available: &[u32], must: &[u32], size: usize) -> Vec<u32> {
    let uuids = |gpus: &[u32]| -> Vec<String> { gpus.iter().map(|gpu| u(*gpu)).collect() };
    let resource = resource(&config(), machine);
    let ids = resource.preferred(Distributed, &uuids(available), &uuids(must), size);
    let all: Vec<u32> = (0..16).collect();
    let mut gpus: Vec<u32> = ids
        .iter()
        .map(|id| *all.iter().find(|gpu| u(**gpu) == *id).expect("a GPU"))
        .collect();
    gpus.sort_unstable();
    gpus
}

/// A machine with eight GPUs like NVIDIA's DGX-1 with V100: two meshes of four GPUs, where some pairs have two NVLinks.
fn dgx1(bus: impl Fn(usize, usize) -> LinkKind) -> PluginMachine {
    let mut machine = machine(8);
    on_bus(&mut machine, bus);
    linked(
        &mut machine,
        &[
            (0, 1, 1),
            (0, 2, 1),
            (0, 3, 2),
            (0, 4, 2),
            (1, 2, 2),
            (1, 3, 1),
            (1, 5, 2),
            (2, 3, 2),
            (2, 6, 1),
            (3, 7, 1),
            (4, 5, 1),
            (4, 6, 1),
            (4, 7, 2),
            (5, 6, 2),
            (5, 7, 1),
            (6, 7, 2),
        ],
    );
    machine
}

/// Set how close each pair of GPUs is on the PCI bus.
fn on_bus(machine: &mut PluginMachine, kind: impl Fn(usize, usize) -> LinkKind) {
    let uuids: Vec<String> = machine.gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    for (a, gpu) in machine.gpus.iter_mut().enumerate() {
        let peers = uuids.iter().enumerate().filter(|(b, _)| *b != a);
        gpu.links.extend(peers.map(|(b, uuid)| GpuLink {
            peer: uuid.clone(),
            kind: kind(a, b),
            count: 0,
        }));
    }
}

#[test]
fn t12_the_gpus_of_a_dgx_1_are_chosen_by_their_nvlinks() {
    let machine = dgx1(|a, b| if a / 4 == b / 4 { LinkKind::Node } else { LinkKind::System });
    let all: Vec<u32> = (0..8).collect();
    for (available, must, size, expected) in [
        (&all[..], &[][..], 1, &[0u32][..]),
        (&all, &[], 2, &[0, 3]),
        (&all, &[], 3, &[0, 2, 3]),
        (&all, &[], 4, &[0, 1, 2, 3]),
        (&all, &[], 5, &[0, 1, 2, 3, 4]),
        (&all, &[], 6, &[0, 1, 2, 3, 4, 5]),
        (&all, &[], 7, &[0, 1, 2, 3, 4, 5, 6]),
        (&all, &[], 8, &[0, 1, 2, 3, 4, 5, 6, 7]),
        (&all[1..], &[], 2, &[1, 2]),
        (&all, &[5], 2, &[5, 6]),
        (&all, &[0, 7], 4, &[0, 4, 6, 7]),
        (&all, &[], 9, &[]),
        (&all, &[], 0, &[]),
        (&all[1..], &[0], 2, &[]),
        (&all, &[0, 1], 1, &[]),
    ] {
        assert_eq!(
            chosen(&machine, available, must, size),
            expected,
            "{available:?} {must:?} {size}"
        );
    }
}

#[test]
fn the_bus_decides_where_nvlinks_do_not() {
    let machine = dgx1(|a, b| match (a / 2 == b / 2, a / 4 == b / 4) {
        (true, _) => LinkKind::SingleSwitch,
        (false, true) => LinkKind::HostBridge,
        (false, false) => LinkKind::System,
    });
    let all: Vec<u32> = (0..8).collect();
    // The cases of go-gpuallocator's TestBestEffortAllocate.
    for (available, must, size, expected) in [
        (&[0u32, 2, 4, 5][..], &[][..], 2, &[4u32, 5][..]),
        (&[0, 4, 5, 6], &[], 2, &[5, 6]),
        (&[0, 3, 1], &[], 2, &[0, 3]),
        (&[0, 1, 4], &[], 2, &[0, 4]),
        (&all, &[4], 1, &[4]),
        (&all, &[4], 2, &[4, 7]),
        (&all, &[4], 4, &[4, 5, 6, 7]),
        (&all[1..], &[0, 1, 2, 3], 4, &[]),
        (&all, &[0, 2, 4, 6], 4, &[0, 2, 4, 6]),
        (&all, &[1, 2, 3, 4, 5, 6], 4, &[]),
    ] {
        assert_eq!(
            chosen(&machine, available, must, size),
            expected,
            "{available:?} {must:?} {size}"
        );
    }
}

#[test]
fn t13_pairs_with_nvlinks_stay_together() {
    let mut machine = machine(8);
    linked(&mut machine, &[(0, 2, 12), (1, 3, 12), (4, 5, 12), (6, 7, 12)]);
    let all: Vec<u32> = (0..8).collect();
    for (available, must, size, expected) in [
        (&all[..], &[][..], 2, &[0u32, 2][..]),
        (&all[1..], &[], 2, &[1, 3]),
        (&all, &[5], 2, &[4, 5]),
        (&all, &[], 3, &[0, 1, 2]),
        (&all, &[0, 7], 4, &[0, 2, 6, 7]),
    ] {
        assert_eq!(
            chosen(&machine, available, must, size),
            expected,
            "{available:?} {must:?} {size}"
        );
    }
}

#[test]
fn t14_without_nvlinks_the_nearest_gpus_on_the_bus_are_chosen() {
    let mut machine = machine(4);
    on_bus(&mut machine, |a, b| {
        if a / 2 == b / 2 {
            LinkKind::SingleSwitch
        } else {
            LinkKind::System
        }
    });
    assert_eq!(chosen(&machine, &[0, 1, 2, 3], &[], 2), [0, 1]);
    assert_eq!(chosen(&machine, &[1, 2, 3], &[], 2), [2, 3]);
}

#[test]
fn t15_with_fourteen_gpus_the_only_linked_pair_is_chosen() {
    let mut machine = machine(14);
    linked(&mut machine, &[(12, 13, 1)]);
    let all: Vec<u32> = (0..14).collect();
    assert_eq!(chosen(&machine, &all, &[], 2), [12, 13]);
}

fn preferred(
    resource: &OfferedResource,
    policy: SharedDevicesPolicy,
    available: &[String],
    must: &[String],
    size: usize,
) -> Vec<String> {
    resource.preferred(policy, available, must, size)
}

/// Count how many of the chosen devices each GPU or MIG device gives, in descending order.
fn spread(chosen: &[String]) -> Vec<usize> {
    let mut counts = std::collections::BTreeMap::<&str, usize>::new();
    for id in chosen {
        *counts.entry(id.split("::").next().unwrap_or(id)).or_default() += 1;
    }
    let mut counts: Vec<usize> = counts.into_values().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    counts
}

/// A comparison of each device with each other one would take minutes here.
#[test]
fn thousands_of_replicas_can_be_chosen() {
    let resource = resource(&share(SharingStrategy::TimeSlicing, 4096), &machine(16));
    let all = ids(&resource);
    for policy in [Distributed, Packed] {
        let found = preferred(&resource, policy, &all, &all[..4096], 8192);
        assert_eq!(found.iter().collect::<std::collections::BTreeSet<_>>().len(), 8192);
    }
}

#[test]
fn t17_replicas_are_spread_or_packed() {
    let resource = resource(&share(SharingStrategy::TimeSlicing, 3), &machine(2));
    let all = ids(&resource);
    for (size, distributed, packed) in [
        (2, vec![1, 1], vec![2]),
        (4, vec![2, 2], vec![3, 1]),
        (6, vec![3, 3], vec![3, 3]),
    ] {
        assert_eq!(spread(&preferred(&resource, Distributed, &all, &[], size)), distributed);
        assert_eq!(spread(&preferred(&resource, Packed, &all, &[], size)), packed);
    }
    let must = [format!("{}::0", u(0))];
    let gpu_of = |policy| preferred(&resource, policy, &all, &must, 2)[1].clone();
    assert!(gpu_of(Distributed).starts_with(&u(1)));
    assert!(gpu_of(Packed).starts_with(&u(0)));
    // Two replicas of the first GPU are in use already.
    assert_eq!(preferred(&resource, Distributed, &all[2..], &[], 1), [format!("{}::0", u(1))]);
    assert_eq!(preferred(&resource, Packed, &all[2..], &[], 1), [format!("{}::2", u(0))]);
    assert_eq!(preferred(&resource, Packed, &all, &[], 7), [""; 0], "there are only six");
}

#[test]
fn mig_devices_are_spread_or_packed_over_their_gpus() {
    let machine = divided(2, "0=0,0,0;1=0,0,0");
    let resource = resource(&mig(NvidiaMigStrategy::Single), &machine);
    let all = ids(&resource);
    let gpus = |policy, available: &[String], size| -> Vec<String> {
        let chosen = preferred(&resource, policy, available, &[], size);
        chosen.iter().map(|id| id[4..12].to_owned()).collect()
    };
    assert_eq!(gpus(Distributed, &all, 2), ["00000000", "00000001"]);
    assert_eq!(gpus(Packed, &all, 2), ["00000000", "00000000"]);
    assert_eq!(gpus(Distributed, &all[1..], 1), ["00000001"]);
    assert_eq!(gpus(Packed, &all[..5], 2), ["00000001", "00000001"]);
}
