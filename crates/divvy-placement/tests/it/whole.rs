//! Whole GPUs: a vendor's resource for them, next to shared GPUs.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{ContainerKind, GpuLink, GpuRules, Health, Held, Inventory, LinkKind, MiB, Node, Pod, Prefer, Vendor};
use divvy_placement::{Ask, GpuSource, Ledger, NodeGpus as _, NodeRefusal, Reservation, Standing, UnusableGpus};
use proptest::prelude::*;

use crate::fixture::*;

fn amd(gpus: u64) -> Ask {
    Ask::whole(Vendor::Amd, gpus)
}

/// Return a node with two shared GPUs of NVIDIA, of 16 units each, and three whole GPUs of AMD.
fn mixed_node() -> Node {
    let mut node = divvy_node("mixed", &[16, 16]);
    add_amd(&mut node, 3);
    node
}

/// Return a pod that the default scheduler bound without the extender.
fn unnamed(name: &str, node: &str, gpus: u64) -> Pod {
    Pod {
        node: Some(node.to_owned()),
        ..amd_pending(name, gpus)
    }
}

fn uuids(ledger: &Ledger, node: &str, ask: &Ask) -> Result<Vec<String>, NodeRefusal> {
    let choice = ledger.choose(node, ask)?;
    assert_eq!(ledger.fits(node, ask, "u-nobody"), Ok(()));
    Ok(choice.gpus.into_iter().filter_map(|gpu| gpu.uuid).collect())
}

#[test]
fn a_pod_gets_as_many_free_gpus_as_it_requests_or_none() {
    let pods = [
        amd_pod("a", "amd", &[1]),
        divvy_pod("share", "mixed", 0, 16),
        amd_pod("b", "mixed", &[0, 2]),
    ];
    let ledger = ledger(&[amd_node("amd", 4), mixed_node(), divvy_node("shared", &[16])], &pods);
    let amd_uuids = |node: &str, indices: &[usize]| Ok(indices.iter().map(|index| amd_uuid(node, *index)).collect());
    let refused = |text: &str| Err(text.to_owned());
    for (node, gpus, expected) in [
        ("amd", 1, amd_uuids("amd", &[0])),
        ("amd", 3, amd_uuids("amd", &[0, 2, 3])),
        ("amd", 4, refused("fewer than 4 free AMD GPUs")),
        ("amd", u64::MAX, refused("fewer than 18446744073709551615 free AMD GPUs")),
        ("mixed", 1, amd_uuids("mixed", &[1])),
        ("mixed", 2, refused("fewer than 2 free AMD GPUs")),
        ("shared", 1, refused("no AMD GPUs that Divvy offers")),
        ("elsewhere", 1, refused("node \"elsewhere\" not found")),
    ] {
        let found = uuids(&ledger, node, &amd(gpus)).map_err(|refusal| refusal.filter_message(node));
        assert_eq!(found, expected, "{gpus} on {node}");
    }
    // A share goes only to shared GPUs, and sees nothing of the others.
    assert_eq!(uuids(&ledger, "mixed", &ask(16)), Ok(vec![uuid("mixed", 1)]));
    assert_eq!(ledger.node("mixed").expect("known").most_free(), MiB(16 << 10));
    assert_eq!(filter(&ledger, "amd", 1), "Insufficient GPU Memory in one device");
    assert_eq!(
        ledger.choose_at("mixed", &[0], &amd(1)),
        Err(NodeRefusal::TooFewWhole(amd(1)))
    );
    assert_eq!(ledger.choose_at("mixed", &[3], &ask(1)), Err(NodeRefusal::NoGpuFits));
}

/// A GPU may be unavailable although no pod is allocated the whole GPU: memory is held on it, a pod has a share of it, or it
/// failed.
#[test]
fn a_gpu_on_which_anything_is_held_or_that_failed_is_not_free() {
    let edits: [fn(&mut divvy_model::Gpu); 3] = [
        |gpu| gpu.held = MiB(1),
        |gpu| gpu.health = Health::Failed,
        |gpu| gpu.health = Health::Lost,
    ];
    for edit in edits {
        let mut node = amd_node("n", 1);
        edit_gpu(&mut node, 0, edit);
        let refusal = uuids(&ledger(&[node], &[]), "n", &amd(1)).expect_err("not free");
        assert_eq!(refusal.filter_message("n"), "no free AMD GPU");
    }
    let mut share = amd_pod("share", "n", &[0]);
    if let Held::Allocation(allocation) = &mut share.held {
        (allocation.gpus[0].memory, allocation.gpus[0].whole) = (MiB(1), false);
    }
    let ledger = ledger(&[amd_node("n", 1)], &[share]);
    let refusal = uuids(&ledger, "n", &amd(1)).expect_err("not free");
    assert_eq!(refusal.filter_message("n"), "no free AMD GPU");
    assert_eq!(ledger.anomalies(), []);
}

#[test]
fn pods_without_an_allocation_hold_gpus_that_nobody_can_name() {
    let nodes = [amd_node("n", 4)];
    let fits = |pods: &[Pod], gpus: u64| ledger(&nodes, pods).fits("n", &amd(gpus), "u-nobody").is_ok();
    assert!(fits(&[unnamed("u", "n", 1)], 3));
    assert!(!fits(&[unnamed("u", "n", 1)], 4));
    assert!(!fits(&[unnamed("u", "n", 2), amd_pod("a", "n", &[0])], 2));
    assert!(fits(&[unnamed("u", "n", 2), amd_pod("a", "n", &[0])], 1));
    // The GPU of such a pod is not counted twice when the inventory shows it as held.
    let mut shown = nodes.clone();
    edit_gpu(&mut shown[0], 2, |gpu| gpu.held = gpu.total);
    let fits_shown = |pods: &[Pod], gpus: u64| ledger(&shown, pods).fits("n", &amd(gpus), "u-nobody").is_ok();
    assert!(fits_shown(&[unnamed("u", "n", 1)], 3));
    assert!(fits_shown(&[unnamed("u", "n", 2)], 2));
    assert!(!fits_shown(&[unnamed("u", "n", 2)], 3));
    // That a GPU with an allocation is held as well says nothing about the others.
    assert!(fits_shown(&[unnamed("u", "n", 1), amd_pod("a", "n", &[2])], 2));
    assert!(!fits_shown(&[unnamed("u", "n", 1), amd_pod("a", "n", &[2])], 3));
    // An allocation that names fewer GPUs than the pod requests frees none of the others.
    let mut forged = amd_pod("a", "n", &[0]);
    forged.request = amd_request(&[(ContainerKind::App, 3)]);
    assert!(fits(std::slice::from_ref(&forged), 1));
    assert!(!fits(&[forged], 2));
    // A pod that names a GPU of the node's past, as after a replacement, holds no other in its place.
    assert!(fits(&[amd_pod("a", "n", &[7])], 4));
    // The kubelet's choice is a normal case.
    let ledger = ledger(&nodes, &[unnamed("u", "n", 2)]);
    assert_eq!((ledger.anomalies(), ledger.totals().not_allocated), (Vec::new(), 0));
    assert_eq!(ledger.node("n").expect("known").unnamed_whole(Vendor::Amd.into()), 2);
    assert_eq!(
        ledger.explain("n", &amd(3)).to_string(),
        "node n: 4 of 4 AMD GPUs are not allocated, but pods without an allocation use 2 of them; 3 are needed: GPU 0 is not allocated, \
         GPU 1 is not allocated, GPU 2 is not allocated, GPU 3 is not allocated"
    );
}

/// Faults of the units of gpu-mem do not concern whole GPUs; faults of the agent or the kubelet do.
#[test]
fn whole_gpus_are_offered_whatever_is_wrong_with_gpu_mem() {
    let edit = |node: &mut Node, edit: &dyn Fn(&mut Inventory)| {
        if let Some(Ok(inventory)) = &mut node.inventory {
            edit(inventory);
        }
    };
    let check = |node: Node, expected: Option<GpuSource>, whole: bool| {
        let name = node.name.clone();
        let ledger = ledger(&[node], &[]);
        let view = ledger.node(&name).expect("known");
        let state = view.state().expect("known");
        assert_eq!(expected.as_ref().unwrap_or(&state.source), &state.source);
        assert_eq!(ledger.fits(&name, &amd(1), "u").is_ok(), whole, "{:?}", state.source);
    };
    check(amd_node("n", 1), Some(GpuSource::Inventory), true);
    check(mixed_node(), Some(GpuSource::Inventory), true);
    let mut node = mixed_node();
    node.capacity_units = 0;
    check(node, Some(GpuSource::Unusable(UnusableGpus::NotShared)), true);
    let mut node = mixed_node();
    node.capacity_units = 31;
    check(node, None, true);
    let mut node = mixed_node();
    edit(&mut node, &|inventory| inventory.unit = divvy_model::MemoryUnit::MIB);
    check(node, None, true);
    // Another plugin shares the two GPUs of NVIDIA: gpushare's division does not see the others.
    let mut node = mixed_node();
    (node.capacity_units, node.capacity_gpus) = (30, 2);
    check(node, Some(GpuSource::Division), true);
    for mut node in [amd_node("n", 1), mixed_node()] {
        edit(&mut node, &|inventory| inventory.unschedulable = true);
        check(node.clone(), Some(GpuSource::Unusable(UnusableGpus::Unschedulable)), false);
        node.capacity_units = 0;
        check(node, Some(GpuSource::Unusable(UnusableGpus::Unschedulable)), false);
    }
}

#[test]
fn gpushares_indices_mean_shared_gpus() {
    let mut node = mixed_node();
    if let Some(Ok(inventory)) = &mut node.inventory {
        inventory.gpus.reverse();
    }
    let mut ledger = ledger(&[node], &[gpushare_pod("old", "mixed", 0, 16)]);
    ledger.name_unhealthy("mixed", BTreeSet::from([1]));
    let view = ledger.node("mixed").expect("known");
    let state = view.state().expect("known");
    assert_eq!((state.by_index(0), state.by_index(2)), (Some(0), None));
    let order: Vec<_> = state.gpus.iter().map(|gpu| (gpu.vendor, gpu.index)).collect();
    assert!(order.is_sorted(), "{order:?}");
    assert_eq!(filter(&ledger, "mixed", 1), "Insufficient GPU Memory in one device");
    assert_eq!(uuids(&ledger, "mixed", &amd(3)).map(|uuids| uuids.len()), Ok(3));
}

#[test]
fn preferred_gpus_come_before_connected_ones() {
    let mut node = amd_node("n", 4);
    let link = |to: usize| GpuLink {
        peer: amd_uuid("n", to),
        kind: LinkKind::Xgmi,
        count: 1,
    };
    edit_gpu(&mut node, 0, |gpu| gpu.links = vec![link(2)]);
    edit_gpu(&mut node, 1, |gpu| gpu.links = vec![link(3)]);
    edit_gpu(&mut node, 3, |gpu| gpu.total = MiB(196_608));
    let ledger = ledger(&[node], &[]);
    let with = |gpus: u64, rules: GpuRules| {
        let ask = Ask {
            rules: Some(std::sync::Arc::new(Ok(rules))),
            ..amd(gpus)
        };
        uuids(&ledger, "n", &ask)
    };
    let n = |indices: &[usize]| Ok(indices.iter().map(|index| amd_uuid("n", *index)).collect());
    assert_eq!(uuids(&ledger, "n", &amd(2)), n(&[0, 2]));
    assert_eq!(uuids(&ledger, "n", &amd(3)), n(&[0, 1, 2]));
    assert_eq!(uuids(&ledger, "n", &amd(4)), n(&[0, 1, 2, 3]));
    let large = GpuRules {
        prefer: Some(Prefer::MostMemory),
        ..GpuRules::default()
    };
    assert_eq!(with(1, large), n(&[3]));
    let least = || GpuRules {
        least_memory: MiB(100_000),
        ..GpuRules::default()
    };
    assert_eq!(with(1, least()), n(&[3]));
    let refusal = with(2, least()).expect_err("one is large enough");
    let refusal = refusal.filter_message("n");
    assert!(refusal.starts_with("fewer than 2 GPUs"), "{refusal}");
}

#[test]
fn containers_that_run_together_have_different_gpus() {
    use ContainerKind::{App, Init, Sidecar};
    let ledger = ledger(&[amd_node("n", 4)], &[]);
    let request = amd_request(&[(Sidecar, 1), (Init, 3), (App, 1), (App, 1)]);
    let ask = Ask::of(&request, GIB);
    assert_eq!((ask.gpus, ask.units), (4, 0));
    let held = ledger.choose("n", &ask).expect("room").held(&request, GIB);
    let Held::Allocation(allocation) = held else {
        panic!("{held:?}")
    };
    assert!(allocation.gpus.iter().all(|share| share.whole && share.memory == AMD_MEMORY));
    let of = |container: &str| -> Vec<usize> {
        let shares = &allocation.containers[container];
        assert!(shares.iter().all(|share| share.memory == AMD_MEMORY));
        let index = |uuid: &str| (0..4).find(|index| amd_uuid("n", *index) == uuid).expect("a GPU of n");
        shares.iter().map(|share| index(&share.uuid)).collect()
    };
    assert_eq!(
        (of("c0"), of("c1"), of("c2"), of("c3")),
        (vec![0], vec![1, 2, 3], vec![1], vec![2])
    );
    assert_eq!(divvy_model::Allocation::parse(&allocation.to_json()), Ok(allocation));
}

#[test]
fn a_request_that_is_only_for_whole_gpus_is_not_nothing() {
    let ledger = ledger(&[amd_node("n", 1)], &[amd_pod("a", "n", &[0])]);
    let pod = amd_pending("p", 1);
    let ask = Ask::of_pod(&pod, GIB);
    assert!(!ask.is_nothing());
    assert_eq!(ledger.fits("n", &ask, &pod.uid), Err(NodeRefusal::TooFewWhole(ask.clone())));
    let report = ledger.explain("n", &ask);
    assert_eq!(
        report.to_string(),
        "node n: 0 of 1 AMD GPUs are not allocated; 1 is needed: GPU 0 is in use by default/a"
    );
    assert_eq!((report.fitting(), ledger.room("n", &ask).fitting), ((0, 1), 0));
}

#[test]
fn victims_leave_as_many_whole_gpus_as_the_pod_requests() {
    let urgent = |gpus: u64| Pod {
        priority: 1000,
        ..amd_pending("urgent", gpus)
    };
    let at = |priority: i32, pod: Pod| Pod { priority, ..pod };
    let check = |pods: &[Pod], gpus: u64, proposed: &[&str], expected: Option<&[&str]>| {
        let mut node = amd_node("n", 4);
        (node.cpu_milli, node.memory_bytes, node.pods) = (8_000, 64 << 30, 110);
        let ledger = ledger(&[node], pods);
        let proposed: Vec<String> = proposed.iter().map(|name| format!("u-{name}")).collect();
        let found = ledger.victims("n", &urgent(gpus), &proposed);
        let expected = expected.map(|names| names.iter().map(|name| format!("u-{name}")).collect::<Vec<_>>());
        assert_eq!(found, expected, "{gpus} GPUs, proposed {proposed:?}");
    };
    let named = [
        at(0, amd_pod("a", "n", &[0, 1])),
        at(5, amd_pod("b", "n", &[2])),
        at(2000, amd_pod("c", "n", &[3])),
    ];
    check(&named, 1, &["a"], Some(&["a"]));
    check(&named, 3, &["a", "b"], Some(&["a", "b"]));
    check(&named, 4, &["a", "b"], None);
    // Pods without an allocation go like others, by their number of GPUs.
    let unnamed = [
        at(0, unnamed("x", "n", 2)),
        at(5, unnamed("y", "n", 1)),
        at(7, amd_pod("a", "n", &[0])),
    ];
    check(&unnamed, 2, &["x"], Some(&["x"]));
    check(&unnamed, 1, &["y"], Some(&["y"]));
    check(&unnamed, 3, &["x", "y"], Some(&["x", "y"]));
    check(&unnamed, 4, &["x", "y", "a"], Some(&["a", "x", "y"]));
    check(&unnamed, 2, &[], Some(&["x"]));
}

/// A nominated pod keeps as many whole GPUs as it requests.
#[test]
fn whole_gpus_are_kept_for_a_nominated_pod() {
    let nominated = Pod {
        priority: 10,
        nominated: Some("n".into()),
        ..amd_pending("vip", 2)
    };
    let ledger = ledger(&[amd_node("n", 3)], std::slice::from_ref(&nominated));
    let fits = |pod: &Pod| ledger.fits("n", &Ask::of_pod(pod, GIB), &pod.uid).is_ok();
    assert!(fits(&amd_pending("one", 1)));
    assert!(!fits(&amd_pending("two", 2)));
    assert!(fits(&nominated));
}

#[derive(Debug, Clone)]
enum Event {
    /// The extender places a pod with this many GPUs, and its Binding takes effect at once or only later.
    Place(u64, bool),
    /// The Binding of a reservation takes effect.
    Confirm(usize),
    /// kube-scheduler binds a pod by the node's sums, without the extender.
    Bypass(u64),
    /// The extender places a share of 8 units.
    Share,
    /// A pod ends.
    End(usize),
    Fail(usize),
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => (1..4u64, any::<bool>()).prop_map(|(gpus, at_once)| Event::Place(gpus, at_once)),
        2 => (0..8usize).prop_map(Event::Confirm),
        2 => (1..3u64).prop_map(Event::Bypass),
        1 => Just(Event::Share),
        2 => (0..8usize).prop_map(Event::End),
        1 => (0..3usize).prop_map(Event::Fail),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Whatever happens, no whole GPU is promised to two pods, and pods with and without an allocation together hold no more GPUs
    /// than there are.
    #[test]
    fn no_whole_gpu_is_promised_twice(events in proptest::collection::vec(any_event(), 1..50)) {
        const GPUS: usize = 5;
        let mut node = divvy_node("n", &[16, 16]);
        add_amd(&mut node, GPUS);
        let mut ledger = ledger(std::slice::from_ref(&node), &[]);
        // What exists, by UID: bound pods, and pods whose Binding is under way.
        let (mut bound, mut sent): (BTreeMap<String, Pod>, BTreeMap<String, Pod>) = Default::default();
        for (number, event) in events.into_iter().enumerate() {
            let name = format!("p{number}");
            let requested = |pods: &BTreeMap<String, Pod>| pods.values().filter_map(|pod| pod.request.whole.as_ref()?.gpus()).sum::<u64>();
            match event {
                Event::Place(..) | Event::Share => {
                    let pod = match event {
                        Event::Place(gpus, _) => amd_pending(&name, gpus),
                        _ => pending(&name, 8),
                    };
                    let ask = Ask::of_pod(&pod, GIB);
                    let choice = ledger.choose("n", &ask);
                    prop_assert_eq!(choice.is_ok(), ledger.fits("n", &ask, &pod.uid).is_ok());
                    let Ok(choice) = choice else { continue };
                    let held = choice.held(&pod.request, GIB);
                    let now_bound = Pod { node: Some("n".to_owned()), held: held.clone(), ..pod.clone() };
                    ledger.apply_pod(pod.clone());
                    if matches!(event, Event::Place(_, true)) {
                        ledger.apply_pod(now_bound.clone());
                        bound.insert(pod.uid, now_bound);
                        continue;
                    }
                    let reservation = Reservation {
                        pod: pod.key(),
                        held,
                        earlier: Vec::new(),
                        standing: Standing::InFlight,
                        since_ns: 0,
                    };
                    ledger.reserve(&pod.uid, "n", reservation);
                    sent.insert(pod.uid, now_bound);
                }
                Event::Confirm(at) => {
                    let Some(uid) = sent.keys().nth(at).cloned() else { continue };
                    let pod = sent.remove(&uid).expect("it is there");
                    ledger.apply_pod(pod.clone());
                    bound.insert(uid, pod);
                }
                Event::Bypass(gpus) => {
                    if requested(&bound) + requested(&sent) + gpus > GPUS as u64 {
                        continue;
                    }
                    let pod = unnamed(&name, "n", gpus);
                    ledger.apply_pod(pod.clone());
                    bound.insert(pod.uid.clone(), pod);
                }
                Event::End(at) => {
                    let Some(uid) = bound.keys().nth(at).cloned() else { continue };
                    bound.remove(&uid);
                    ledger.delete_pod(&uid);
                }
                Event::Fail(at) => {
                    let mut node = node.clone();
                    edit_gpu(&mut node, 2 + at, |gpu| gpu.health = Health::Failed);
                    ledger.apply_node(&node);
                }
            }
            let mut owners: BTreeMap<&str, usize> = BTreeMap::new();
            for pod in bound.values().chain(sent.values()) {
                let Held::Allocation(allocation) = &pod.held else { continue };
                for share in &allocation.gpus {
                    prop_assert_eq!(share.whole, share.uuid.starts_with("0x"));
                    *owners.entry(&share.uuid).or_default() += usize::from(share.whole);
                }
            }
            prop_assert!(owners.values().all(|owners| *owners <= 1), "{:?}", owners);
            let named: usize = owners.values().sum();
            let unnamed = ledger.node("n").expect("known").unnamed_whole(Vendor::Amd.into());
            prop_assert!(named as u64 + unnamed <= GPUS as u64);
            prop_assert_eq!(ledger.overbooked_since(0), Vec::new());
            prop_assert_eq!(ledger.anomalies(), Vec::new());
        }
    }
}
