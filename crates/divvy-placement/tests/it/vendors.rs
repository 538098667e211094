//! Shares of GPUs of several vendors.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::{Enforcement, GpuRules, Held, MiB, Node, Pod, Vendor};
use divvy_placement::{Ask, Ledger, Refusal};
use proptest::prelude::*;

use crate::fixture::*;

/// The units of an AMD GPU of [`share_amd`].
const AMD_UNITS: u64 = 63;

/// A node that offers these numbers of GPUs of both vendors in both ways. NVIDIA's have 16 units.
fn node(name: &str, nvidia: usize, amd: usize) -> Node {
    let mut node = divvy_node(name, &vec![16; nvidia]);
    offer_whole(&mut node);
    add_amd(&mut node, amd);
    share_amd(&mut node);
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

#[test]
fn a_pod_gets_shares_of_the_vendor_that_it_names_and_of_nvidia_if_it_names_none() {
    let ledger = ledger(&[node("both", 1, 1), node("nvidia", 1, 0), node("amd", 0, 1)]);
    let (none, nvidia, amd) = (&[][..], &[("gpu-vendor", "nvidia")][..], &[("gpu-vendor", "amd")][..]);
    let full = "Insufficient GPU Memory in one device";
    let (no_nvidia, no_amd) = (
        "no shared NVIDIA GPU (divvy.dev/gpu-vendor)",
        "no shared AMD GPU (divvy.dev/gpu-vendor)",
    );
    for (annotations, units, expected) in [
        (none, 16, [Ok(Vendor::Nvidia), Ok(Vendor::Nvidia), Err(no_nvidia)]),
        (none, 17, [Err(full), Err(full), Err(no_nvidia)]),
        (nvidia, 16, [Ok(Vendor::Nvidia), Ok(Vendor::Nvidia), Err(no_nvidia)]),
        (nvidia, 17, [Err(full), Err(full), Err(no_nvidia)]),
        (amd, 16, [Ok(Vendor::Amd), Err(no_amd), Ok(Vendor::Amd)]),
        (amd, AMD_UNITS + 1, [Err(full), Err(no_amd), Err(full)]),
    ] {
        let pod = share("p", units, annotations);
        let ask = Ask::of_pod(&pod, GIB);
        for (node, expected) in ["both", "nvidia", "amd"].into_iter().zip(expected) {
            let what = format!("{annotations:?} {units} on {node}");
            let chosen = ledger.choose(node, &ask).map(|choice| {
                let uuid = choice.gpus[0].uuid.clone().unwrap_or_default();
                if uuid.starts_with("0x") { Vendor::Amd } else { Vendor::Nvidia }
            });
            let chosen = chosen.map_err(|refusal| refusal.filter_message(node));
            assert_eq!(chosen, expected.map_err(str::to_owned), "{what}");
            let fits = ledger
                .fits(node, &ask, "u-nobody")
                .map_err(|refusal| refusal.filter_message(node));
            assert_eq!(fits, expected.map(drop).map_err(str::to_owned), "{what}");
        }
    }
    let refused = |node: &str, annotations| {
        let pod = share("p", 1, annotations);
        ledger.explain(node, &Ask::of_pod(&pod, GIB)).to_string()
    };
    let says = "the annotation divvy.dev/gpu-vendor selects the vendor (NVIDIA without it)";
    assert_eq!(
        [refused("amd", none), refused("nvidia", amd)],
        [
            format!("node amd shares no NVIDIA GPU, but GPUs of another vendor; {says}"),
            format!("node nvidia shares no AMD GPU, but GPUs of another vendor; {says}"),
        ]
    );
}

#[test]
fn a_share_of_an_amd_gpu_has_memory_only_and_a_pod_that_wants_its_compute_time_limited_finds_no_node() {
    let mut limited = node("n", 0, 1);
    edit_gpu(&mut limited, 0, |gpu| gpu.enforcement = Some(Enforcement::CGROUP));
    let ledger = ledger(&[limited]);
    for (annotations, expected) in [
        (&[("isolation", "hard")][..], ""),
        (&[("isolation", "soft")], ""),
        (
            &[("gpu-cores", "30")],
            "no GPU from AMD on which compute time is limited (gpu-cores: 30)",
        ),
        (&[("gpu-cores", "30"), ("isolation", "none")], ""),
    ] {
        let annotations: Vec<_> = annotations.iter().copied().chain([("gpu-vendor", "amd")]).collect();
        let ask = Ask::of_pod(&share("p", 1, &annotations), GIB);
        let found = ledger
            .fits("n", &ask, "u-nobody")
            .map_err(|refusal| refusal.filter_message("n"));
        assert_eq!(found.err().unwrap_or_default(), expected, "{annotations:?}");
    }
}

/// gpushare names GPUs by index, and knows those of one vendor. Each vendor counts its own.
#[test]
fn an_index_names_a_gpu_of_the_default_vendor() {
    let both = node("n", 1, 2);
    let mut ledger = ledger(std::slice::from_ref(&both));
    ledger.apply_pod(gpushare_pod("a", "n", 0, 4));
    ledger.apply_pod(gpushare_pod("b", "n", 1, 4));
    ledger.name_unhealthy("n", [1].into());
    assert_eq!(free(&ledger, "n"), [12, AMD_UNITS, AMD_UNITS]);
    let ask = Ask::of_pod(
        &share("p", AMD_UNITS, &[("gpu-vendor", "amd"), ("gpu-uuid", &amd_uuid("n", 1))]),
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
    prop_oneof![Just(Vendor::Nvidia), Just(Vendor::Amd)]
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
    fn a_share_is_never_on_another_vendors_gpu_and_never_beside_a_pod_that_has_the_whole_gpu(
        events in proptest::collection::vec(any_event(), 1..60),
    ) {
        let node = node("n", 2, 2);
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
            let has_room = |refusal: &Refusal| !matches!(refusal, Refusal::OtherVendor(_) | Refusal::NoGpuTaken(_));
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
