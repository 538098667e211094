//! Shares of GPUs of several vendors.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::{Enforcement, GpuRules, Held, MiB, Node, Pod, Vendor};
use divvy_placement::{Ask, Ledger, NodeRefusal};
use proptest::prelude::*;

use crate::fixture::*;

/// The units of a GPU of [`share_whole`].
const UNITS: u64 = 63;

/// A node that offers these numbers of GPUs of the vendors, in the order of [`Vendor::ALL`], in both ways. NVIDIA's have 16 units.
fn node(name: &str, gpus: [usize; 3]) -> Node {
    let mut counts = Vendor::ALL.into_iter().zip(gpus);
    let (_, nvidia) = counts.next().expect("the vendor whose GPUs are shared by default");
    let mut node = divvy_node(name, &vec![16; nvidia]);
    offer_whole(&mut node);
    counts.for_each(|(vendor, gpus)| add_whole(&mut node, vendor, gpus));
    share_whole(&mut node);
    node
}

fn ledger(nodes: &[Node]) -> Ledger {
    let mut ledger = Ledger::new(GIB);
    for node in nodes {
        ledger.apply_node(node);
    }
    ledger
}

fn share(name: &str, units: u64, annotations: &[(&str, &str)]) -> Pod {
    let annotations = annotations
        .iter()
        .map(|(key, value)| (format!("divvy.dev/{key}"), (*value).to_owned()));
    let rules = GpuRules::from_annotations(&annotations.collect()).transpose();
    let mut pod = pending(name, units);
    pod.request.rules = rules.map(Arc::new);
    pod
}

/// A pod that names no vendor gets shares of NVIDIA's GPUs.
#[test]
fn a_pod_gets_shares_of_its_named_vendor() {
    let nodes = [
        ("all", [1, 1, 1]),
        ("nvidia", [1, 0, 0]),
        ("amd", [0, 1, 0]),
        ("intel", [0, 0, 1]),
    ];
    let objects = nodes.map(|(name, gpus)| node(name, gpus));
    let ledger = ledger(&objects);
    let (none, nvidia) = (&[][..], &[("gpu-vendor", "nvidia")][..]);
    let (amd, intel) = (&[("gpu-vendor", "amd")][..], &[("gpu-vendor", "intel")][..]);
    for (annotations, vendor, most) in [
        (none, Vendor::Nvidia, 16),
        (nvidia, Vendor::Nvidia, 16),
        (amd, Vendor::Amd, UNITS),
        (intel, Vendor::Intel, UNITS),
    ] {
        let cases = nodes.iter().zip(&objects).flat_map(|node| [(node, most), (node, most + 1)]);
        for (((node, counts), object), units) in cases {
            let has = Vendor::ALL
                .into_iter()
                .zip(counts)
                .any(|(of, count)| of == vendor && *count > 0);
            let expected = match (has, units > most) {
                (true, false) => Ok(vendor),
                (true, true) => Err("Insufficient GPU Memory in one device".to_owned()),
                (false, _) => Err(format!("no shared {vendor} GPU (divvy.dev/gpu-vendor)")),
            };
            let what = format!("{annotations:?} {units} on {node}");
            let pod = share("p", units, annotations);
            let ask = Ask::of_pod(&pod, GIB);
            let inventory = object
                .inventory
                .as_ref()
                .and_then(|read| read.as_ref().ok())
                .expect("an inventory");
            let chosen = ledger.choose(node, &ask).map(|choice| {
                let uuid = choice.gpus[0].uuid.clone().unwrap_or_default();
                inventory.gpu(&uuid).expect("of the node").vendor
            });
            let chosen = chosen.map_err(|refusal| refusal.filter_message(node));
            assert_eq!(chosen, expected, "{what}");
            let fits = ledger
                .fits(node, &ask, "u-nobody")
                .map_err(|refusal| refusal.filter_message(node));
            assert_eq!(fits, expected.map(drop), "{what}");
        }
    }
    let refused = |node: &str, annotations| {
        let pod = share("p", 1, annotations);
        ledger.explain(node, &Ask::of_pod(&pod, GIB)).to_string()
    };
    let says = "the annotation divvy.dev/gpu-vendor selects the vendor (NVIDIA without it)";
    assert_eq!(
        [refused("amd", none), refused("nvidia", amd), refused("amd", intel)],
        [
            format!("node amd shares no NVIDIA GPU, but GPUs of another vendor; {says}"),
            format!("node nvidia shares no AMD GPU, but GPUs of another vendor; {says}"),
            format!("node amd shares no Intel GPU, but GPUs of another vendor; {says}"),
        ]
    );
}

/// A pod that requires a limit on its compute time finds no node.
#[test]
fn another_vendors_share_has_memory_only() {
    let nodes = [("amd", [0, 1, 0]), ("intel", [0, 0, 1])].map(|(name, gpus)| {
        let mut limited = node(name, gpus);
        edit_gpu(&mut limited, 0, |gpu| gpu.enforcement = Some(Enforcement::CGROUP));
        limited
    });
    let ledger = ledger(&nodes);
    let cases = [
        (&[("isolation", "hard")][..], ""),
        (&[("isolation", "soft")], ""),
        (
            &[("gpu-cores", "30")],
            "no GPU from {} on which compute time is limited (gpu-cores: 30)",
        ),
        (&[("gpu-cores", "30"), ("isolation", "none")], ""),
    ];
    for (vendor, (annotations, expected)) in [Vendor::Amd, Vendor::Intel]
        .into_iter()
        .flat_map(|vendor| cases.map(|case| (vendor, case)))
    {
        let (node, title) = (vendor.name(), vendor.title());
        let annotations: Vec<_> = annotations.iter().copied().chain([("gpu-vendor", node)]).collect();
        let ask = Ask::of_pod(&share("p", 1, &annotations), GIB);
        let found = ledger
            .fits(node, &ask, "u-nobody")
            .map_err(|refusal| refusal.filter_message(node));
        assert_eq!(
            found.err().unwrap_or_default(),
            expected.replace("{}", title),
            "{annotations:?}"
        );
    }
}

/// Where the kernel keeps no limits, as for a GPU whose memory is in several tiles.
#[test]
fn enforcement_excludes_gpus_without_limits() {
    let ledger = ledger(&[node("n", [0, 1, 1])]);
    for (vendor, isolation) in [("amd", "hard"), ("intel", "hard"), ("intel", "soft")] {
        let pod = share("p", 1, &[("gpu-vendor", vendor), ("isolation", isolation)]);
        let refusal = ledger
            .fits("n", &Ask::of_pod(&pod, GIB), "u-nobody")
            .expect_err("not limited");
        let text = refusal.filter_message("n");
        assert!(text.contains(&format!("(isolation: {isolation})")), "{text}");
    }
}

/// gpushare names GPUs by index, and knows those of one vendor. Each vendor counts its own.
#[test]
fn an_index_names_a_gpu_of_the_default_vendor() {
    let both = node("n", [1, 2, 1]);
    let mut ledger = ledger(std::slice::from_ref(&both));
    ledger.apply_pod(gpushare_pod("a", "n", 0, 4));
    ledger.apply_pod(gpushare_pod("b", "n", 1, 4));
    ledger.name_unhealthy("n", [1].into());
    assert_eq!(free(&ledger, "n"), [12, UNITS, UNITS, UNITS]);
    let ask = Ask::of_pod(
        &share("p", UNITS, &[("gpu-vendor", "amd"), ("gpu-uuid", &amd_uuid("n", 1))]),
        GIB,
    );
    assert!(ledger.fits("n", &ask, "u-nobody").is_ok());
}

#[derive(Debug, Clone)]
enum Event {
    Whole(Vendor, u64),
    Share(Option<Vendor>, u64),
    End(usize),
}

fn any_vendor() -> impl Strategy<Value = Vendor> {
    prop::sample::select(&Vendor::ALL[..])
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        2 => (any_vendor(), 1..3u64).prop_map(|(vendor, gpus)| Event::Whole(vendor, gpus)),
        4 => (proptest::option::of(any_vendor()), 1..40u64).prop_map(|(vendor, units)| Event::Share(vendor, units)),
        3 => (0..8usize).prop_map(Event::End),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever arrives and ends, each pod is on GPUs of its vendor, filter and bind agree, no GPU has two pods of which one has it as a whole, and no
    /// GPU is promised more than it has.
    #[test]
    fn a_share_is_never_on_another_vendors_gpu(
        events in proptest::collection::vec(any_event(), 1..60),
    ) {
        let node = node("n", [2, 2, 2]);
        let inventory = node.inventory.clone().expect("an inventory").expect("readable");
        let mut ledger = ledger(&[node]);
        let mut bound: BTreeMap<String, (Pod, Vendor)> = BTreeMap::new();
        for (number, event) in events.into_iter().enumerate() {
            let name = format!("p{number}");
            let (pod, vendor) = match event {
                Event::Whole(vendor, gpus) => (whole_pending(vendor, &name, gpus), vendor),
                Event::Share(vendor, units) => {
                    let mut pod = pending(&name, units);
                    vendor.into_iter().for_each(|vendor| of_vendor(&mut pod, vendor));
                    (pod, vendor.unwrap_or(Vendor::Nvidia))
                }
                Event::End(at) => {
                    let Some(uid) = bound.keys().nth(at).cloned() else { continue };
                    bound.remove(&uid);
                    ledger.delete_pod(&uid);
                    ledger.end_pod(&uid);
                    continue;
                }
            };
            let ask = Ask::of_pod(&pod, GIB);
            let choice = ledger.choose("n", &ask);
            prop_assert_eq!(choice.is_ok(), ledger.fits("n", &ask, &pod.uid).is_ok());
            let has_room = |refusal: &NodeRefusal| !matches!(refusal, NodeRefusal::OtherVendor(_) | NodeRefusal::NoGpuTaken(_));
            prop_assert!(choice.as_ref().err().is_none_or(has_room), "{choice:?}");
            let Ok(choice) = choice else { continue };
            let pod = Pod { node: Some("n".to_owned()), held: choice.held(&pod.request, GIB), ..pod };
            ledger.apply_pod(pod.clone());
            bound.insert(pod.uid.clone(), (pod, vendor));
            let mut on: BTreeMap<&str, Vec<(bool, MiB)>> = BTreeMap::new();
            for (pod, vendor) in bound.values() {
                let Held::Allocation(allocation) = &pod.held else { panic!("{pod:?}") };
                for share in &allocation.gpus {
                    let gpu = inventory.gpu(&share.uuid).expect("of the node");
                    prop_assert_eq!(gpu.vendor, *vendor);
                    on.entry(&gpu.uuid).or_default().push((share.whole, share.memory));
                }
            }
            for (uuid, parts) in &on {
                let sum: u64 = parts.iter().map(|(_, memory)| memory.0).sum();
                let gpu = inventory.gpu(uuid).expect("of the node");
                prop_assert!(sum <= inventory.capacity(gpu).0, "{uuid}: {parts:?}");
                prop_assert!(parts.len() == 1 || parts.iter().all(|(whole, _)| !whole), "{uuid}: {parts:?}");
            }
        }
    }
}
