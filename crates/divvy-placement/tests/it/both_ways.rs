//! GPUs that are offered in both ways: their memory is shared, and a pod can also request a whole one.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::{GpuRules, Held, MiB, Node, Pod, Vendor};
use divvy_placement::{Ask, Ledger, NodeRefusal};

use crate::fixture::*;

/// A node with GPUs of 16 units that are offered in both ways.
pub(crate) fn node(gpus: usize) -> Node {
    let mut node = divvy_node("n", &vec![16; gpus]);
    offer_whole(&mut node);
    node
}

pub(crate) fn nvidia(gpus: u64) -> Ask {
    Ask::whole(Vendor::Nvidia, gpus)
}

pub(crate) fn ledger(node: &Node, pods: &[Pod]) -> Ledger {
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(node);
    for pod in pods {
        ledger.apply_pod(pod.clone());
    }
    ledger
}

/// Let the ledger place a pending pod on the node, and return the pod as it is then bound.
fn placed(ledger: &Ledger, pod: &Pod) -> Result<Pod, NodeRefusal> {
    let choice = ledger.choose("n", &Ask::of_pod(pod, GIB))?;
    Ok(Pod {
        node: Some("n".to_owned()),
        held: choice.held(&pod.request, GIB),
        ..pod.clone()
    })
}

/// A pod that kube-scheduler bound without the extender.
pub(crate) fn unnamed(name: &str, gpus: u64) -> Pod {
    Pod {
        node: Some("n".to_owned()),
        ..whole_pending(Vendor::Nvidia, name, gpus)
    }
}

/// A GPU with a share cannot be taken as a whole, and a GPU taken as a whole has no share left.
#[test]
fn a_gpu_is_either_shared_or_wholly_taken() {
    let share = divvy_pod("share", "n", 0, 1);
    let mut ledger = ledger(&node(2), &[share]);
    let whole = placed(&ledger, &whole_pending(Vendor::Nvidia, "whole", 1)).expect("GPU 1 is free");
    let Held::Allocation(allocation) = &whole.held else {
        panic!("{whole:?}")
    };
    let gpu = &allocation.gpus[0];
    assert_eq!(
        (gpu.uuid.as_str(), gpu.memory, gpu.whole),
        (&*uuid("n", 1), MiB(16 << 10), true)
    );
    assert_eq!(ledger.choose("n", &nvidia(2)), Err(NodeRefusal::TooFewWhole(nvidia(2))));
    ledger.apply_pod(whole);
    assert_eq!(ledger.choose("n", &nvidia(1)), Err(NodeRefusal::TooFewWhole(nvidia(1))));
    assert_eq!(ledger.node("n").expect("known").most_free(), MiB(15 << 10));
    assert!(ledger.fits("n", &ask(15), "u-nobody").is_ok());
    assert_eq!(ledger.fits("n", &ask(16), "u-nobody"), Err(NodeRefusal::NoGpuFits));
    assert_eq!(
        ledger.explain("n", &nvidia(1)).to_string(),
        "node n: 0 of 2 NVIDIA GPUs are not allocated; 1 is needed: GPU 0 is in use by default/share, GPU 1 is in use by default/whole"
    );
    assert_eq!(
        ledger.explain("n", &ask(16)).to_string(),
        "node n has no GPU with 16 units (16384 MiB) free: GPU 0 has 15360 of 16384 MiB free, GPU 1 has 0 of 16384 MiB free"
    );
}

/// A client without the extender may write an allocation of a few MiB for a pod that requests a whole GPU.
#[test]
fn a_forged_annotation_still_holds_the_whole_gpu() {
    let mut forged = placed(&ledger(&node(1), &[]), &whole_pending(Vendor::Nvidia, "forged", 1)).expect("it is free");
    if let Held::Allocation(allocation) = &mut forged.held {
        (allocation.gpus[0].memory, allocation.gpus[0].whole) = (MiB(1), false);
    }
    let ledger = ledger(&node(1), &[forged]);
    assert_eq!(ledger.node("n").expect("known").most_free(), MiB::ZERO);
}

/// The GPU of a pod without an allocation may be any free one, so one GPU per such pod gets no shares.
#[test]
fn shares_avoid_gpus_that_unallocated_pods_may_have() {
    let check = |gpus: usize, pods: &[Pod], units: u64, expected: Result<usize, ()>| {
        let ledger = ledger(&node(gpus), pods);
        let chosen = ledger.choose("n", &ask(units)).map(|choice| choice.gpus[0].index as usize);
        assert_eq!(chosen.map_err(drop), expected, "{pods:?}");
        assert_eq!(ledger.fits("n", &ask(units), "u-nobody").is_ok(), expected.is_ok());
    };
    check(1, &[unnamed("u", 1)], 1, Err(()));
    check(2, &[unnamed("u", 1)], 1, Ok(0));
    check(2, &[unnamed("u", 1), divvy_pod("share", "n", 0, 4)], 12, Ok(0));
    check(2, &[unnamed("u", 1), divvy_pod("share", "n", 0, 4)], 13, Err(()));
    // The inventory shows which GPU it is.
    let mut shown = node(2);
    edit_gpu(&mut shown, 1, |gpu| gpu.held = gpu.total);
    let ledger = ledger(&shown, &[unnamed("u", 1)]);
    assert_eq!(ledger.choose("n", &ask(16)).map(|choice| choice.gpus[0].index), Ok(0));
    assert!(ledger.fits("n", &nvidia(1), "u-nobody").is_ok());
    assert!(ledger.fits("n", &nvidia(2), "u-nobody").is_err());
}

/// A cluster moves from NVIDIA's plugin to Divvy node by node. kube-scheduler has counted the GPUs of NVIDIA's plugin.
#[test]
fn kube_scheduler_decides_for_another_plugins_gpus() {
    let mut theirs = Node {
        name: "n".to_owned(),
        whole: BTreeMap::from([(Vendor::Nvidia.into(), 8)]),
        ..Node::default()
    };
    let check = |node: &Node, ask: &Ask, expected: Result<usize, &str>| {
        let ledger = ledger(node, &[unnamed("running", 3)]);
        let found = ledger.choose("n", ask).map(|choice| choice.gpus.len());
        let found = found.map_err(|refusal| refusal.filter_message("n"));
        assert_eq!(found, expected.map_err(str::to_owned));
        assert_eq!(ledger.fits("n", ask, "u-nobody").is_ok(), expected.is_ok());
    };
    check(&theirs, &nvidia(2), Ok(0));
    // The products of these GPUs are not known.
    let picky = Ask {
        rules: Some(Arc::new(Ok(GpuRules {
            least_memory: MiB(1),
            ..GpuRules::default()
        }))),
        ..nvidia(2)
    };
    check(&theirs, &picky, Err("no NVIDIA GPUs that Divvy offers"));
    check(&theirs, &Ask::whole(Vendor::Amd, 1), Err("no AMD GPUs that Divvy offers"));
    // The agent offers shares, and another plugin the whole GPUs.
    theirs.inventory = divvy_node("n", &[16]).inventory;
    theirs.capacity_units = 16;
    check(&theirs, &nvidia(2), Ok(0));
    // The agent offers both.
    offer_whole(&mut theirs);
    check(&theirs, &nvidia(2), Err("fewer than 2 free NVIDIA GPUs"));
    let report = ledger(&node(0), &[]).explain("n", &nvidia(1)).to_string();
    assert_eq!(report, "node n has no NVIDIA GPUs that Divvy offers");
    let victims = |node: &Node| {
        ledger(node, &[]).victims(
            "n",
            &whole_pending(Vendor::Nvidia, "vip", 1),
            &["u-b".to_owned(), "u-a".to_owned()],
        )
    };
    theirs.inventory = None;
    assert_eq!(victims(&theirs), Some(vec!["u-a".to_owned(), "u-b".to_owned()]));
}

#[test]
fn a_pod_that_needs_a_whole_gpu_evicts_all_shares_of_one_gpu() {
    let mut pods = vec![
        divvy_pod("a", "n", 0, 2),
        divvy_pod("b", "n", 0, 2),
        divvy_pod("c", "n", 1, 9),
    ];
    pods.iter_mut().for_each(|pod| pod.priority = 0);
    let vip = Pod {
        priority: 10,
        ..whole_pending(Vendor::Nvidia, "vip", 1)
    };
    let ledger = ledger(&node(2), &pods);
    let way = ledger.in_the_way("n", &vip).expect("all have a lower priority");
    assert_eq!((way.indices, way.pods.len()), (vec![1], 1));
}
