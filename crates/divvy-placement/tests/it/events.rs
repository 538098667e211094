//! Events in every order, and reservations.

use std::collections::BTreeSet;

use divvy_model::{Health, Held, Phase};
use divvy_placement::{Ledger, Reservation, Standing};

use crate::fixture::*;

fn reservation(node: &str, index: usize, units: u64) -> Reservation {
    let pod = divvy_pod("q", node, index, units);
    Reservation {
        pod: pod.key(),
        held: pod.held,
        earlier: Vec::new(),
        standing: Standing::InFlight,
        since_ns: 0,
    }
}

fn two_nodes() -> Ledger {
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("n1", &[16, 16]));
    ledger.apply_node(&divvy_node("n2", &[16]));
    ledger.apply_pod(pending("q", 8));
    ledger
}

#[test]
fn a_reservation_holds_until_the_pods_own_event_confirms_it() {
    let mut ledger = two_nodes();
    ledger.reserve("u-q", "n1", reservation("n1", 0, 8));
    assert_eq!(free(&ledger, "n1"), [8, 16]);
    // A state without a node says nothing about a Binding that is under way.
    let mut q = pending("q", 8);
    q.cpu_milli = 100;
    ledger.apply_pod(q);
    assert_eq!(free(&ledger, "n1"), [8, 16]);
    assert_eq!(ledger.bound_to("u-q"), None);
    ledger.set_standing("u-q", "n1", Standing::Bound, 0);
    assert_eq!(ledger.bound_to("u-q"), Some("n1"));
    ledger.apply_pod(divvy_pod("q", "n1", 0, 8));
    assert_eq!(free(&ledger, "n1"), [8, 16], "counted once");
    assert!(ledger.reservation("u-q", "n1").is_none());
    assert_eq!(ledger.bound_to("u-q"), Some("n1"));
    assert!(!ledger.release("u-q", "n1"), "what is confirmed cannot be given back");
    assert_eq!(free(&ledger, "n1"), [8, 16]);
}

#[test]
fn a_pod_bound_elsewhere_gives_its_other_reservations_back() {
    let mut ledger = two_nodes();
    ledger.reserve("u-q", "n1", reservation("n1", 0, 8));
    ledger.reserve("u-q", "n2", reservation("n2", 0, 8));
    assert_eq!((free(&ledger, "n1"), free(&ledger, "n2")), (vec![8, 16], vec![8]));
    ledger.apply_pod(divvy_pod("q", "n2", 0, 8));
    assert_eq!((free(&ledger, "n1"), free(&ledger, "n2")), (vec![16, 16], vec![8]));
    ledger.reserve("u-q", "n1", reservation("n1", 0, 8));
    assert_eq!(free(&ledger, "n1"), [16, 16], "a binding is final");
}

/// The reservation of a pod that was not seen so far survives a list.
#[test]
fn a_deleted_pod_gives_its_reservation_back() {
    let mut ledger = two_nodes();
    ledger.reserve("u-q", "n1", reservation("n1", 0, 8));
    ledger.replace_pods([]);
    assert_eq!(free(&ledger, "n1"), [16, 16], "known before, not listed: gone");
    let mut young = reservation("n1", 1, 4);
    young.pod.name = "young".to_owned();
    ledger.reserve("u-young", "n1", young);
    ledger.replace_pods([]);
    assert_eq!(free(&ledger, "n1"), [16, 12], "may be younger than the list");
    assert!(ledger.release("u-young", "n1"));
    assert_eq!(free(&ledger, "n1"), [16, 16]);
    assert_eq!(ledger.reservations().count(), 0);
}

#[test]
fn a_pods_own_reservation_is_not_in_its_way() {
    let mut ledger = two_nodes();
    ledger.reserve("u-q", "n1", reservation("n1", 0, 16));
    ledger.reserve("u-r", "n1", reservation("n1", 1, 16));
    assert!(ledger.fits("n1", &ask(16), "u-q").is_ok());
    assert!(ledger.fits("n1", &ask(16), "u-other").is_err());
    ledger.apply_pod(divvy_pod("q", "n1", 0, 16));
    assert!(ledger.fits("n1", &ask(16), "u-q").is_ok(), "it is bound there");
}

#[test]
fn a_pod_re_created_under_its_name_is_another_pod() {
    // `docs/compatibility/races.md`, R7. gpushare leaks the memory of the old pod here (gpushare-scheduler-extender issue 201).
    let old = divvy_pod("web-0", "n1", 0, 10);
    let mut new = divvy_pod("web-0", "n2", 0, 6);
    new.uid = "u-second".to_owned();
    for late in [false, true] {
        let mut ledger = two_nodes();
        ledger.apply_pod(old.clone());
        if !late {
            ledger.delete_pod(&old.uid);
        }
        ledger.apply_pod(new.clone());
        if late {
            ledger.delete_pod(&old.uid);
        }
        assert_eq!((free(&ledger, "n1"), free(&ledger, "n2")), (vec![16, 16], vec![10]));
        assert_eq!(ledger.pod_named(&new.key()).map(|pod| pod.uid.as_str()), Some("u-second"));
    }
}

#[test]
fn late_states_of_gone_pods_count_for_nothing() {
    let mut ledger = two_nodes();
    ledger.reserve("u-q", "n1", reservation("n1", 0, 8));
    ledger.bury_pod("u-q");
    assert_eq!(free(&ledger, "n1"), [16, 16]);
    assert!(!ledger.apply_pod(divvy_pod("q", "n1", 0, 8)));
    ledger.replace_pods([divvy_pod("q", "n1", 0, 8)]);
    assert_eq!(free(&ledger, "n1"), [16, 16]);
    ledger.delete_pod("u-q");
    let mut again = divvy_pod("q", "n1", 0, 8);
    again.uid = "u-again".to_owned();
    assert!(ledger.apply_pod(again));
    assert_eq!(free(&ledger, "n1"), [8, 16]);
}

#[test]
fn a_node_may_change_vanish_and_come_back_under_its_pods() {
    // Cases 20 and 21 of `docs/compatibility/gpushare.md`.
    let mut ledger = Ledger::new(GIB);
    ledger.apply_pod(gpushare_pod("early", "n1", 0, 10));
    assert_eq!(filter(&ledger, "n1", 1), "node \"n1\" not found");
    ledger.apply_node(&gpushare_node("n1", 0, 2));
    assert!(filter(&ledger, "n1", 1).contains("not for GPU share"), "the count came first");
    ledger.apply_node(&gpushare_node("n1", 32, 2));
    assert_eq!(free(&ledger, "n1"), [6, 16]);
    ledger.apply_node(&gpushare_node("n1", 48, 2));
    assert_eq!(free(&ledger, "n1"), [14, 24]);
    ledger.delete_node("n1");
    assert_eq!(filter(&ledger, "n1", 1), "node \"n1\" not found");
    ledger.apply_node(&gpushare_node("n1", 16, 1));
    assert_eq!(free(&ledger, "n1"), [6]);
    ledger.delete_node("n1");
    ledger.delete_pod("u-early");
    assert_eq!(ledger.nodes().count(), 0, "nothing stays behind");
}

#[test]
fn requests_of_every_pod_are_kept_and_versions_rise() {
    let mut ledger = two_nodes();
    let mut cpu_only = pending("web", 0);
    cpu_only.node = Some("n1".to_owned());
    cpu_only.cpu_milli = 250;
    cpu_only.memory_bytes = 1 << 30;
    let before = ledger.node("n1").expect("known").version();
    assert!(ledger.apply_pod(cpu_only.clone()));
    let view = ledger.node("n1").expect("known");
    assert_eq!(view.requested(), (250, 1 << 30, 1));
    let after = view.version();
    assert!(after > before);
    assert!(!ledger.apply_pod(cpu_only.clone()), "the same again changes nothing");
    assert_eq!(ledger.node("n1").expect("known").version(), after);
    cpu_only.phase = Phase::Succeeded;
    ledger.apply_pod(cpu_only);
    assert_eq!(ledger.node("n1").expect("known").requested(), (0, 0, 0));
}

#[test]
fn a_pod_without_a_uid_is_left_out() {
    let mut ledger = two_nodes();
    let mut pod = divvy_pod("p", "n1", 0, 8);
    pod.uid.clear();
    assert!(!ledger.apply_pod(pod));
    assert_eq!(free(&ledger, "n1"), [16, 16]);
    ledger.apply_pod(gpushare_pod("nothing", "n1", 0, 0));
    let nothing = ledger.pod("u-nothing").expect("known").clone();
    assert_eq!(ledger.whereabouts(&nothing).expect("bound").shares.len(), 1);
    assert!(matches!(nothing.held, Held::Legacy(_)));
}

/// GPUs that are named unhealthy are not used, no matter whether the naming or the node arrives first. When the naming ends,
/// exactly these GPUs are used again.
#[test]
fn gpus_are_out_while_named_unhealthy() {
    let health = |ledger: &Ledger| -> Vec<(Health, Option<String>)> {
        let view = ledger.node("n1").expect("known");
        let gpus = &view.state().expect("seen").gpus;
        gpus.iter().map(|gpu| (gpu.health, gpu.reason.clone())).collect()
    };
    let set = |indices: &[u32]| indices.iter().copied().collect::<BTreeSet<u32>>();
    let well = (Health::Ok, None);
    let named = (
        Health::Failed,
        Some("named in ConfigMap kube-system/unhealthy-gpu-n1".to_owned()),
    );
    let broken = (Health::Failed, Some("XID 79".to_owned()));
    let mut node = divvy_node("n1", &[16, 16]);
    let mut ledger = Ledger::new(GIB);
    ledger.name_unhealthy("n1", set(&[1, 7]));
    ledger.apply_node(&node);
    assert_eq!(health(&ledger), [well.clone(), named.clone()]);
    assert!(!ledger.apply_node(&node), "the same again is no change");
    ledger.name_unhealthy("n1", set(&[0]));
    assert_eq!(health(&ledger), [named.clone(), well.clone()]);
    // A failure in the inventory remains when the naming ends.
    if let Some(Ok(inventory)) = &mut node.inventory {
        inventory.gpus[0].health = Health::Failed;
        inventory.gpus[0].reason = Some("XID 79".to_owned());
    }
    ledger.apply_node(&node);
    assert_eq!(health(&ledger), [broken.clone(), well.clone()]);
    ledger.replace_unhealthy([("n2".to_owned(), set(&[0]))]);
    assert_eq!(health(&ledger), [broken, well.clone()]);
    ledger.delete_node("n1");
    ledger.replace_unhealthy([("n1".to_owned(), set(&[1]))]);
    ledger.apply_node(&divvy_node("n1", &[16, 16]));
    assert_eq!(health(&ledger), [well.clone(), named]);
    ledger.replace_unhealthy([]);
    assert_eq!(health(&ledger), [well.clone(), well]);
}
