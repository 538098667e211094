//! More cases of GPUs that are offered in both ways, which a review found.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::{GpuRules, MiB, Node, Pod, Vendor};
use divvy_placement::{Ask, Reservation, Standing};

use crate::both_ways::{ledger, node, nvidia, unnamed};
use crate::fixture::*;

fn with(gpus: u64, rules: GpuRules) -> Ask {
    Ask {
        rules: Some(Arc::new(Ok(rules))),
        ..nvidia(gpus)
    }
}

/// GPU 0 is held by a running pod without an allocation; GPU 1 has a pod of low priority.
fn held_node() -> Node {
    let mut node = node(2);
    (node.cpu_milli, node.memory_bytes, node.pods) = (64_000, 64 << 30, 110);
    edit_gpu(&mut node, 0, |gpu| gpu.held = gpu.total);
    node
}

/// The located pod has no allocation.
#[test]
fn a_located_pod_allows_preemption_on_other_gpus() {
    let holder = Pod {
        priority: 2000,
        ..unnamed("w", 1)
    };
    let low = divvy_pod("low", "n", 1, 16);
    let vip = Pod {
        priority: 10,
        ..whole_pending(Vendor::Nvidia, "vip", 1)
    };
    let ledger = ledger(&held_node(), &[holder, low]);
    assert_eq!(
        ledger.victims("n", &vip, &["u-low".to_owned()]),
        Some(vec!["u-low".to_owned()])
    );
}

#[test]
fn a_located_pod_without_an_allocation_can_be_preempted() {
    let low = unnamed("w", 1);
    let high = Pod {
        priority: 2000,
        ..divvy_pod("high", "n", 1, 16)
    };
    let vip = Pod {
        priority: 10,
        ..whole_pending(Vendor::Nvidia, "vip", 1)
    };
    let ledger = ledger(&held_node(), &[low, high]);
    assert_eq!(ledger.victims("n", &vip, &["u-w".to_owned()]), Some(vec!["u-w".to_owned()]));
}

/// GPU 0 is held by containers whose pod was deleted by force. The pod without an allocation has not started yet.
#[test]
fn preemption_frees_no_gpu_held_without_a_pod() {
    let mut node = node(3);
    (node.cpu_milli, node.memory_bytes, node.pods) = (64_000, 64 << 30, 110);
    edit_gpu(&mut node, 0, |gpu| (gpu.held, gpu.held_by_pod) = (gpu.total, Some(false)));
    let vip = Pod {
        priority: 10,
        ..whole_pending(Vendor::Nvidia, "vip", 2)
    };
    let ledger = ledger(&node, &[unnamed("w", 1), divvy_pod("low", "n", 1, 16)]);
    assert_eq!(
        ledger.victims("n", &vip, &["u-w".to_owned()]),
        Some(vec!["u-low".to_owned(), "u-w".to_owned()])
    );
}

/// docs/operate.md: "To go back, remove the label and let NVIDIA's plugin run on the node again." The inventory stays on the node.
#[test]
fn a_node_that_went_back_to_nvidias_plugin_is_left_to_it() {
    let mut node = node(2);
    (node.capacity_units, node.capacity_gpus) = (0, 0);
    node.whole = BTreeMap::from([(Vendor::Nvidia.into(), 2)]);
    if let Some(Ok(inventory)) = &mut node.inventory {
        // What the agent wrote when it stopped.
        inventory.unschedulable = true;
    }
    assert_eq!(
        ledger(&node, &[])
            .fits("n", &nvidia(1), "u")
            .map_err(|refusal| refusal.filter_message("n")),
        Ok(())
    );
}

#[test]
fn unreadable_nodes_are_left_to_no_other_plugin() {
    let mut node = node(2);
    node.whole = BTreeMap::from([(Vendor::Nvidia.into(), 2)]);
    let text = r#"{"v":3}"#;
    node.inventory = Some(divvy_model::Inventory::parse(text));
    assert!(ledger(&node, &[]).fits("n", &nvidia(1), "u").is_err());
}

#[test]
fn a_named_free_gpu_fits_beside_unknown_ones() {
    let ledger = ledger(&node(4), &[unnamed("w", 1)]);
    let rules = GpuRules {
        uuids: vec![uuid("n", 3)],
        ..GpuRules::default()
    };
    assert!(ledger.fits("n", &nvidia(3), "u").is_ok());
    assert!(ledger.fits("n", &with(1, rules), "u").is_ok());
}

#[test]
fn shares_of_several_gpus_may_use_shared_gpus() {
    let ledger = ledger(&node(3), &[unnamed("w", 1), divvy_pod("share", "n", 0, 4)]);
    let rules = GpuRules {
        gpus: Some(2),
        ..GpuRules::default()
    };
    let ask = Ask {
        rules: Some(Arc::new(Ok(rules))),
        gpus: 2,
        units: 16,
        memory: Some(MiB(8 << 10)),
        ..ask(16)
    };
    // GPU 0 and GPU 1, so that GPU 2 stays free.
    assert!(ledger.fits("n", &ask, "u").is_ok());
}

#[test]
fn a_reservation_needs_a_node_that_offers_shares() {
    let mut node = node(1);
    let mut ledger = ledger(&node, &[]);
    let pod = pending("p", 4);
    let ask = Ask::of_pod(&pod, GIB);
    let held = ledger.choose("n", &ask).expect("room").held(&pod.request, GIB);
    ledger.apply_pod(pod.clone());
    ledger.reserve(
        &pod.uid,
        "n",
        Reservation {
            pod: pod.key(),
            held,
            earlier: Vec::new(),
            standing: Standing::Doubt,
            since_ns: 0,
        },
    );
    // The kubelet has no gpu-mem at the moment: it would reject the pod for good.
    node.capacity_units = 0;
    ledger.apply_node(&node);
    assert!(ledger.fits("n", &ask, "u-nobody").is_err());
    assert!(ledger.fits("n", &ask, &pod.uid).is_err());
}
