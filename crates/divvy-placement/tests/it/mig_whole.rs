//! MIG devices that are offered as a whole, through one resource for each profile, and shared as well.

use std::collections::BTreeMap;

use divvy_model::{Held, MiB, Node, Partition, Pod, Vendor, WholeKind};
use divvy_placement::{Ask, NodeRefusal};

use crate::both_ways::ledger;
use crate::fixture::*;

const SMALL: &str = "1g.5gb";
const LARGE: &str = "3g.20gb";

fn mig(profile: &str) -> WholeKind {
    WholeKind::Mig(profile.parse().expect("a profile"))
}

/// A node with a GPU of 16 units, two MIG devices of 4 units, and one of 19 units.
fn node() -> Node {
    let mut node = divvy_node("n", &[16, 4, 4, 19]);
    for (index, profile) in [(1, SMALL), (2, SMALL), (3, LARGE)] {
        edit_gpu(&mut node, index, |gpu| {
            gpu.whole = Some(mig(profile));
            gpu.partition = Some(Partition {
                parent: "GPU-of-parts".to_owned(),
                profile: profile.to_owned(),
            });
        });
    }
    edit_gpu(&mut node, 0, |gpu| gpu.whole = Some(Vendor::Nvidia.into()));
    node
}

fn chosen(pods: &[Pod], ask: &Ask) -> Result<Vec<u32>, NodeRefusal> {
    let ledger = ledger(&node(), pods);
    let chosen = ledger.choose("n", ask);
    assert_eq!(chosen.is_ok(), ledger.fits("n", ask, "u-nobody").is_ok(), "{ask:?}");
    chosen.map(|choice| choice.gpus.iter().map(|gpu| gpu.index).collect())
}

fn bound(pods: &[Pod], kind: WholeKind, name: &str, devices: u64) -> Pod {
    let pod = whole_pending(kind, name, devices);
    let choice = ledger(&node(), pods).choose("n", &Ask::of_pod(&pod, GIB)).expect("it fits");
    Pod {
        node: Some("n".to_owned()),
        held: choice.held(&pod.request, GIB),
        ..pod
    }
}

#[test]
fn a_pod_gets_only_devices_of_its_profile() {
    let check = |kind: WholeKind, devices: u64, expected: Result<&[u32], &str>| {
        let found = chosen(&[], &Ask::whole(kind, devices)).map_err(|refusal| refusal.filter_message("n"));
        assert_eq!(found.as_deref(), expected.map_err(str::to_owned).as_ref().copied(), "{kind}");
    };
    check(mig(SMALL), 2, Ok(&[1, 2]));
    check(mig(LARGE), 1, Ok(&[3]));
    check(Vendor::Nvidia.into(), 1, Ok(&[0]));
    check(mig(SMALL), 3, Err("fewer than 3 free MIG 1g.5gb devices"));
    check(Vendor::Nvidia.into(), 2, Err("fewer than 2 free NVIDIA GPUs"));
    check(mig("2g.10gb"), 1, Err("no MIG 2g.10gb devices that Divvy offers"));
}

#[test]
fn a_device_is_shared_or_had_as_a_whole() {
    let share = divvy_pod("share", "n", 1, 1);
    let whole = bound(std::slice::from_ref(&share), mig(SMALL), "whole", 1);
    let Held::Allocation(allocation) = &whole.held else {
        panic!("{whole:?}")
    };
    let got: Vec<(&str, MiB, bool)> = allocation
        .gpus
        .iter()
        .map(|gpu| (gpu.uuid.as_str(), gpu.memory, gpu.whole))
        .collect();
    assert_eq!(got, [(uuid("n", 2).as_str(), MiB(4096), true)], "device 1 has a share");
    let pods = [share, whole];
    assert_eq!(
        chosen(&pods, &Ask::whole(mig(SMALL), 1))
            .expect_err("no room")
            .filter_message("n"),
        "no free MIG 1g.5gb device"
    );
    assert_eq!(chosen(&pods, &ask(3)), Ok(vec![1]), "the rest of device 1");
    assert_eq!(
        ledger(&node(), &pods).explain("n", &Ask::whole(mig(SMALL), 1)).to_string(),
        "node n: 0 of 2 MIG 1g.5gb devices are not allocated; 1 is needed: GPU 1 is in use by default/share, GPU 2 is in use by default/whole"
    );
}

/// kube-scheduler is not told of every profile, so it may bind such pods without the extender.
#[test]
fn an_unallocated_pod_counts_only_for_its_profile() {
    let unnamed = Pod {
        node: Some("n".to_owned()),
        ..whole_pending(mig(SMALL), "unnamed", 1)
    };
    let pods = [unnamed];
    assert!(chosen(&pods, &Ask::whole(mig(SMALL), 1)).is_ok());
    assert_eq!(
        chosen(&pods, &Ask::whole(mig(SMALL), 2))
            .expect_err("no room")
            .filter_message("n"),
        "fewer than 2 free MIG 1g.5gb devices"
    );
    assert_eq!(chosen(&pods, &Ask::whole(mig(LARGE), 1)), Ok(vec![3]));
    assert_eq!(chosen(&pods, &Ask::whole(Vendor::Nvidia, 1)), Ok(vec![0]));
    let ledger = ledger(&node(), &pods);
    let view = ledger.node("n").expect("known");
    assert_eq!((view.unnamed_whole(mig(SMALL)), view.unnamed_whole(mig(LARGE))), (1, 0));
}

/// A cluster moves from NVIDIA's plugin to Divvy node by node.
#[test]
fn kube_scheduler_decides_for_another_plugins_mig_devices() {
    let theirs = Node {
        name: "n".to_owned(),
        whole: BTreeMap::from([(mig(SMALL), 7)]),
        ..Node::default()
    };
    let ledger = ledger(&theirs, &[]);
    let fits = |kind: WholeKind| ledger.fits("n", &Ask::whole(kind, 1), "u-nobody");
    assert_eq!(fits(mig(SMALL)), Ok(()));
    assert!(matches!(
        fits(mig(LARGE)),
        Err(NodeRefusal::Unusable(_) | NodeRefusal::NoneOfKind(_))
    ));
}

/// The kubelet still lists the devices of a profile for some seconds after they were destroyed, and would reject a pod that is bound now.
#[test]
fn a_kind_without_devices_is_not_another_plugins() {
    let mut node = node();
    node.whole = BTreeMap::from([(mig("2g.10gb"), 3), (Vendor::Nvidia.into(), 1)]);
    let fits = |node: &Node| ledger(node, &[]).fits("n", &Ask::whole(mig("2g.10gb"), 1), "u-nobody");
    assert_eq!(fits(&node), Err(NodeRefusal::NoneOfKind(mig("2g.10gb"))));
    // With the strategy single, nothing is offered as a whole while the GPUs are not divided alike.
    for index in 0..4 {
        edit_gpu(&mut node, index, |gpu| gpu.whole = None);
    }
    assert_eq!(fits(&node), Err(NodeRefusal::NoneOfKind(mig("2g.10gb"))));
}
