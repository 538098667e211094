//! Pods with rules, which accept only some GPUs.

use std::sync::Arc;

use divvy_model::{Enforcement, GpuRules, Health, Node, Pod, Vendor};
use divvy_placement::{Ask, Ledger, NodeRefusal};
use divvy_policy::{CacheLimits, Fleet, Policy};

use super::fixture::{GIB, add_whole, divvy_node, edit_gpu, gpushare_node, pending, share_whole};

fn asking(units: u64, annotations: &[(&str, &str)]) -> Pod {
    let mut pod = pending("p", units);
    let annotations = annotations
        .iter()
        .map(|(key, value)| (format!("divvy.dev/{key}"), (*value).to_owned()));
    pod.request.rules = GpuRules::from_annotations(&annotations.collect()).transpose().map(Arc::new);
    pod
}

fn product(node: &mut Node, index: usize, model: &str, cc: &str, sms: u32) {
    edit_gpu(node, index, |gpu| {
        gpu.model = model.to_owned();
        gpu.cc = cc.to_owned();
        gpu.sms = sms;
    });
}

/// A ledger with four nodes: one with a T4, an A100, and an H100; one with two T4; one with an A100 of 80 GiB; and one that
/// gpushare's device plugin serves.
fn ledger() -> Ledger {
    let mut mixed = divvy_node("mixed", &[15, 40, 80]);
    product(&mut mixed, 0, "Tesla T4", "7.5", 40);
    product(&mut mixed, 1, "NVIDIA A100-SXM4-40GB", "8.0", 108);
    product(&mut mixed, 2, "NVIDIA H100 80GB HBM3", "9.0", 132);
    let mut small = divvy_node("small", &[15, 15]);
    product(&mut small, 0, "Tesla T4", "7.5", 40);
    product(&mut small, 1, "Tesla T4", "7.5", 40);
    let mut large = divvy_node("large", &[80]);
    product(&mut large, 0, "NVIDIA A100-SXM4-80GB", "8.0", 108);
    let mut ledger = Ledger::new(GIB);
    for node in [mixed, small, large, gpushare_node("old", 32, 2)] {
        ledger.apply_node(&node);
    }
    ledger
}

const NODES: [&str; 4] = ["mixed", "small", "large", "old"];

/// Check the index of the chosen GPU on each node. The check whether the pod fits must agree with the choice.
fn check(ledger: &Ledger, pod: &Pod, expected: [Option<u32>; 4]) {
    let ask = Ask::of(&pod.request, GIB);
    for (node, expected) in NODES.iter().zip(expected) {
        let chosen = ledger.choose(node, &ask);
        assert_eq!(
            chosen.as_ref().map(|choice| choice.gpus[0].index).ok(),
            expected,
            "{ask} on {node}"
        );
        assert_eq!(ledger.fits(node, &ask, "p").is_ok(), expected.is_some(), "{ask} on {node}");
        let report = ledger.explain(node, &ask);
        assert_eq!(report.verdict.is_ok(), expected.is_some(), "{report}");
        for (position, gpu) in report.gpus.iter().enumerate() {
            let at = ledger.choose_at(node, &[position], &ask);
            assert_eq!(gpu.fits, at.is_ok(), "{ask} on {node}, GPU {position}");
        }
    }
}

#[test]
fn a_pod_gets_only_gpus_that_it_takes() {
    let ledger = ledger();
    check(&ledger, &asking(3, &[]), [Some(0), Some(0), Some(0), Some(0)]);
    check(&ledger, &asking(3, &[("gpu-model", "A100*")]), [Some(1), None, Some(0), None]);
    check(&ledger, &asking(3, &[("gpu-model", "!T4")]), [Some(1), None, Some(0), None]);
    check(&ledger, &asking(50, &[("gpu-model", "A100*")]), [None, None, Some(0), None]);
    check(
        &ledger,
        &asking(3, &[("gpu-memory", ">=80Gi")]),
        [Some(2), None, Some(0), None],
    );
    check(
        &ledger,
        &asking(3, &[("gpu-memory", ">=16Gi")]),
        [Some(1), None, Some(0), Some(0)],
    );
    check(
        &ledger,
        &asking(3, &[("gpu-uuid", "GPU-mixed-2, GPU-small-1")]),
        [Some(2), Some(1), None, None],
    );
    check(
        &ledger,
        &asking(
            3,
            &[("gpu-model", "*100*"), ("gpu-memory", ">=80Gi"), ("gpu-uuid", "GPU-mixed-2")],
        ),
        [Some(2), None, None, None],
    );
    // A pod that requests no memory gets no GPU, and fits everywhere.
    let none = Ask::of(&asking(0, &[("gpu-model", "A100*")]).request, GIB);
    assert_eq!(ledger.fits("small", &none, "p"), Ok(()));
}

#[test]
fn what_is_preferred_comes_first_within_a_node_and_over_nodes() {
    let ledger = ledger();
    let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
    fleet.follow(&ledger);
    for (prefer, within, over) in [
        ("fastest", [Some(2), Some(0), Some(0), Some(0)], &["mixed"][..]),
        ("most-memory", [Some(2), Some(0), Some(0), Some(0)], &["mixed", "large"]),
        ("least-memory", [Some(0), Some(0), Some(0), Some(0)], &["mixed", "small"]),
    ] {
        let pod = asking(3, &[("gpu-prefer", prefer)]);
        check(&ledger, &pod, within);
        let ask = Ask::of(&pod.request, GIB);
        let best = fleet.rank(&pod, &ask, NODES, &ledger).best.expect("room");
        assert!(over.contains(&NODES[best]), "{prefer}: {}", NODES[best]);
    }
    // If the most preferred GPU has no room, the next one is chosen.
    let pod = asking(50, &[("gpu-prefer", "least-memory")]);
    check(&ledger, &pod, [Some(2), None, Some(0), None]);
}

#[test]
fn nodes_without_a_gpu_that_the_pod_takes_are_not_ranked() {
    let ledger = ledger();
    let mut fleet = Fleet::new(Policy::Divvy, CacheLimits::SMALL);
    fleet.follow(&ledger);
    let pod = asking(3, &[("gpu-model", "A100*")]);
    let ranking = fleet.rank(&pod, &Ask::of(&pod.request, GIB), NODES, &ledger);
    let ranked: Vec<bool> = ranking.costs.iter().map(Option::is_some).collect();
    assert_eq!(ranked, [true, false, true, false]);
}

/// The costs of the other GPUs of a mixed node do not matter.
#[test]
fn a_node_costs_what_the_gpus_cost_that_the_pod_takes() {
    let wants = asking(3, &[("gpu-model", "A100*")]);
    let ask = Ask::of(&wants.request, GIB);
    let mut alone = divvy_node("mixed", &[40]);
    product(&mut alone, 0, "NVIDIA A100-SXM4-40GB", "8.0", 108);
    let mut only = Ledger::new(GIB);
    only.apply_node(&alone);
    for policy in [Policy::BestFit, Policy::Spread] {
        let cost = |ledger: &Ledger| {
            let mut fleet = Fleet::new(policy, CacheLimits::SMALL);
            fleet.follow(ledger);
            let offered: Vec<(String, usize, i64)> = fleet
                .offers(&wants, &ask, ledger)
                .into_iter()
                .map(|offer| (offer.node, offer.gpus[0], offer.cost))
                .filter(|(node, ..)| node == "mixed")
                .collect();
            let choice = fleet.choose(&wants, &ask, "mixed", ledger).expect("room");
            (
                fleet.rank(&wants, &ask, ["mixed"], ledger).costs,
                offered,
                choice.gpus[0].index,
            )
        };
        let (costs, offered, index) = cost(&ledger());
        assert_eq!(costs, cost(&only).0, "{policy}");
        let amount = costs[0].expect("room").amount;
        assert_eq!((offered, index), (vec![("mixed".to_owned(), 1, amount)], 1), "{policy}");
    }
}

#[test]
fn isolation_gets_a_gpu_with_enforced_shares() {
    let mut ledger = ledger();
    let mut mixed = divvy_node("mixed", &[15, 40, 80]);
    edit_gpu(&mut mixed, 1, |gpu| gpu.enforcement = Some(Enforcement::CGROUP));
    ledger.apply_node(&mixed);
    for (isolation, expected) in [
        ("hard", [Some(1), None, None, None]),
        ("soft", [Some(1), None, None, None]),
        ("none", [Some(0), Some(0), Some(0), Some(0)]),
    ] {
        check(&ledger, &asking(3, &[("isolation", isolation)]), expected);
    }
    let ask = Ask::of(&asking(3, &[("isolation", "hard")]).request, GIB);
    let refusal = ledger.fits("small", &ask, "p").expect_err("refused");
    insta::assert_snapshot!(refusal.filter_text("small"), @"no GPU on which the driver enforces shares (isolation: hard)");
}

/// The result names the reason.
#[test]
fn a_pod_with_unreadable_rules_goes_nowhere() {
    let ledger = ledger();
    let pod = asking(3, &[("gpu-prefer", "best")]);
    check(&ledger, &pod, [None; 4]);
    let ask = Ask::of(&pod.request, GIB);
    let refusal = ledger.fits("small", &ask, "p").expect_err("refused");
    insta::assert_snapshot!(refusal.filter_text("small"), @r#"the pod's annotations: divvy.dev/gpu-prefer: "best" was found; write fastest, most-memory or least-memory"#);
}

#[test]
fn a_refusal_says_what_each_gpu_is() {
    let mut ledger = ledger();
    let mut broken = divvy_node("broken", &[15, 40]);
    product(&mut broken, 0, "Tesla T4", "7.5", 40);
    product(&mut broken, 1, "NVIDIA A100-SXM4-40GB", "8.0", 108);
    edit_gpu(&mut broken, 1, |gpu| gpu.health = Health::Failed);
    ledger.apply_node(&broken);
    let ask = Ask::of(&asking(3, &[("gpu-model", "A100*"), ("gpu-memory", ">=30Gi")]).request, GIB);
    assert!(matches!(ledger.fits("small", &ask, "p"), Err(NodeRefusal::NoGpuTaken(_))));
    assert_eq!(ledger.fits("broken", &ask, "p"), Err(NodeRefusal::NoGpuFits));
    let said = [
        ledger.explain("small", &ask).to_string(),
        ledger.explain("broken", &ask).to_string(),
        ledger.explain("old", &ask).to_string(),
        ledger.fits("small", &ask, "p").expect_err("refused").filter_message("small"),
    ];
    insta::assert_snapshot!(said.join("\n"), @r"
    node small has no GPU of a product like A100* and with 30 GiB or more in all that has 3 units (3072 MiB) free: GPU 0 (Tesla T4, 15360 MiB in all) does not match the pod's rules, GPU 1 (Tesla T4, 15360 MiB in all) does not match the pod's rules
    node broken has no GPU of a product like A100* and with 30 GiB or more in all that has 3 units (3072 MiB) free: GPU 0 (Tesla T4, 15360 MiB in all) does not match the pod's rules, GPU 1 failed
    node old has no GPU of a product like A100* and with 30 GiB or more in all that has 3 units (3072 MiB) free: GPU 0 (of an unknown product, 16384 MiB in all) does not match the pod's rules, GPU 1 (of an unknown product, 16384 MiB in all) does not match the pod's rules
    no GPU of a product like A100* and with 30 GiB or more in all
    ");
}

#[test]
fn a_share_is_placed_on_gpus_of_the_pods_vendor_only() {
    let others = [Vendor::Amd, Vendor::Intel];
    let mut all = divvy_node("all", &[16]);
    others.into_iter().for_each(|vendor| add_whole(&mut all, vendor, 1));
    let [mut amd, mut intel] = others.map(|vendor| {
        let mut node = divvy_node(vendor.name(), &[]);
        add_whole(&mut node, vendor, 2);
        node
    });
    [&mut all, &mut amd, &mut intel].into_iter().for_each(share_whole);
    let nodes = [all, amd, intel, divvy_node("nvidia", &[16, 16])];
    let mut ledger = Ledger::new(GIB);
    for node in &nodes {
        ledger.apply_node(node);
    }
    let names = || nodes.iter().map(|node| node.name.as_str());
    for policy in Policy::ALL {
        let mut fleet = Fleet::new(policy, CacheLimits::default());
        fleet.follow(&ledger);
        for (annotations, vendor, expected) in [
            (&[][..], Vendor::Nvidia, [true, false, false, true]),
            (&[("gpu-prefer", "most-memory")], Vendor::Nvidia, [true, false, false, true]),
            (&[("gpu-vendor", "nvidia")], Vendor::Nvidia, [true, false, false, true]),
            (&[("gpu-vendor", "amd")], Vendor::Amd, [true, true, false, false]),
            (&[("gpu-vendor", "intel")], Vendor::Intel, [true, false, true, false]),
        ] {
            let pod = asking(4, annotations);
            let ask = Ask::of(&pod.request, GIB);
            let ranking = fleet.rank(&pod, &ask, names(), &ledger);
            let ranked: Vec<bool> = ranking.costs.iter().map(Option::is_some).collect();
            assert_eq!(ranked, expected, "{policy:?} {annotations:?}");
            assert!(ranking.best.is_some_and(|at| expected[at]), "{policy:?} {annotations:?}");
            for (node, fits) in nodes.iter().zip(expected) {
                let inventory = node
                    .inventory
                    .as_ref()
                    .and_then(|read| read.as_ref().ok())
                    .expect("an inventory");
                let choice = fleet.choose(&pod, &ask, &node.name, &ledger);
                let uuid = choice.and_then(|choice| choice.gpus[0].uuid.clone());
                let of = uuid.map(|uuid| inventory.gpu(&uuid).expect("of the node").vendor);
                let what = format!("{policy:?} {annotations:?} {}", node.name);
                assert_eq!(of, fits.then_some(vendor), "{what}");
            }
        }
    }
}
