//! The pods that must go so that one GPU has room.

use std::sync::Arc;

use divvy_model::{GpuRules, Pod};
use divvy_placement::{Ask, Ledger};
use proptest::prelude::*;

use crate::fixture::*;

/// A pod on n1: name, GPU, units, priority.
type On = (&'static str, usize, u64, i32);

/// Return a ledger with n1, which has two GPUs of 16 units and 8 cores, and these pods, each with half a core.
fn ledger(pods: &[On]) -> Ledger {
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n1", &[16, 16]);
    (node.cpu_milli, node.memory_bytes, node.pods) = (8_000, 64 << 30, 110);
    ledger.apply_node(&node);
    for (name, gpu, units, priority) in pods {
        ledger.apply_pod(Pod {
            priority: *priority,
            cpu_milli: 500,
            ..divvy_pod(name, "n1", *gpu, *units)
        });
    }
    ledger
}

fn urgent(units: u64) -> Pod {
    Pod {
        priority: 1000,
        ..pending("urgent", units)
    }
}

fn names(uids: Option<Vec<String>>) -> Option<Vec<String>> {
    uids.map(|uids| uids.iter().map(|uid| uid.trim_start_matches("u-").to_owned()).collect())
}

fn victims(ledger: &Ledger, pod: &Pod, proposed: &[&str]) -> Option<Vec<String>> {
    let proposed: Vec<String> = proposed.iter().map(|name| format!("u-{name}")).collect();
    names(ledger.victims("n1", pod, &proposed))
}

fn check(pods: &[On], units: u64, proposed: &[&str], expected: Option<&[&str]>) {
    let expected = expected.map(|names| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>());
    let found = victims(&ledger(pods), &urgent(units), proposed);
    assert_eq!(found, expected, "{units} units with {pods:?}, proposed {proposed:?}");
}

#[test]
fn victims_are_on_one_gpu() {
    // By the sums, 8 of 32 units are missing, and a or c would be enough. For one GPU, a and b must go, or c and d.
    let pods = [("a", 0, 8, 0), ("b", 0, 8, 0), ("c", 1, 8, 0), ("d", 1, 8, 0)];
    check(&pods, 12, &["a", "c"], Some(&["a", "b"]));
    check(&pods, 12, &["a", "b"], Some(&["a", "b"]));
    // The proposed pods are enough, and more than enough.
    check(&pods, 8, &["c", "d"], Some(&["c"]));
    check(&pods, 8, &["a"], Some(&["a"]));
}

#[test]
fn nobody_goes_in_vain() {
    // Whichever pods of lower priority go, no GPU has 12 units free.
    let pods = [("a", 0, 8, 0), ("rock", 0, 8, 2000), ("c", 1, 8, 0), ("hill", 1, 8, 1000)];
    check(&pods, 12, &["a", "c"], None);
    check(&pods, 17, &["a", "c"], None);
    check(&pods, 8, &["c"], Some(&["c"]));
    // GPU 1 has room if one of its pods goes; a is on the other GPU.
    let pods = [("a", 0, 16, 0), ("b", 1, 10, 0), ("c", 1, 4, 0)];
    check(&pods, 6, &["c"], Some(&["c"]));
    check(&pods, 12, &["b"], Some(&["b"]));
}

/// At equal priority, the choice with the fewest pods wins, and then the one with the least memory.
#[test]
fn the_lowest_priority_goes_first() {
    let pods = [("a", 0, 16, 5), ("b", 1, 8, 1), ("c", 1, 8, 3)];
    check(&pods, 12, &["zz"], Some(&["b", "c", "zz"]));
    let pods = [("a", 0, 12, 1), ("a2", 0, 4, 1), ("b", 1, 8, 1), ("c", 1, 8, 1)];
    let found = ledger(&pods);
    let way = |units| {
        let victims = found.in_the_way("n1", &urgent(units)).expect("some");
        (
            victims.indices[0],
            victims.pods.iter().map(|pod| pod.name.as_str()).collect::<Vec<_>>(),
        )
    };
    assert_eq!(way(4), (0, vec!["a2"]));
    assert_eq!(way(7).1.len(), 1);
    assert_eq!(way(8), (1, vec!["b"]));
    assert_eq!(way(12), (0, vec!["a"]));
    assert_eq!(way(16).1.len(), 2);
}

#[test]
fn a_pod_that_is_being_deleted_anyway_goes_before_any_other() {
    let mut ledger = ledger(&[("a", 0, 16, 0), ("b", 1, 16, 0)]);
    ledger.apply_pod(Pod {
        deleting: true,
        priority: 900,
        ..divvy_pod("b", "n1", 1, 16)
    });
    assert_eq!(
        victims(&ledger, &urgent(16), &["a"]).as_deref(),
        Some(&["a".to_owned()][..]),
        "what was proposed is enough"
    );
    let found = ledger.in_the_way("n1", &urgent(16)).expect("some");
    assert_eq!((found.indices[0], found.pods[0].name.as_str()), (1, "b"));
}

#[test]
fn who_was_proposed_for_another_reason_goes_all_the_same() {
    // The node has 8 cores, of which cpu-only has 6.
    let mut ledger = ledger(&[("a", 0, 16, 0), ("b", 1, 16, 0)]);
    ledger.apply_pod(Pod {
        node: Some("n1".to_owned()),
        cpu_milli: 6_000,
        ..pending("cpu-only", 0)
    });
    let pod = Pod {
        cpu_milli: 4_000,
        ..urgent(8)
    };
    let found = victims(&ledger, &pod, &["a", "cpu-only"]).expect("possible");
    assert_eq!(found, ["a", "cpu-only"]);
    // b is not needed for the GPU. But without a, the CPU is still not enough, so further proposed pods are taken.
    let pod = Pod {
        cpu_milli: 7_900,
        ..urgent(8)
    };
    assert_eq!(
        victims(&ledger, &pod, &["a", "b", "cpu-only"]).map(|found| found.len()),
        Some(3)
    );
    // A GPU has room already, so the pod was proposed for a reason that is not known here.
    let empty = self::ledger(&[("a", 0, 8, 0)]);
    assert_eq!(victims(&empty, &urgent(8), &["a"]).expect("possible"), ["a"]);
}

#[test]
fn a_node_that_is_not_known_or_not_offered_is_left_out() {
    assert_eq!(ledger(&[]).victims("n2", &urgent(1), &["u-a".to_owned()]), None);
    assert_eq!(fixture().victims("n3", &urgent(1), &["u-a".to_owned()]), None);
}

proptest! {
    /// After the victims are gone, a GPU has room, and none of the victims could have stayed. No pod of equal or higher
    /// priority goes, unless it was proposed.
    #[test]
    fn the_victims_are_enough_and_none_is_too_many(
        pods in proptest::collection::vec((0_usize..2, 1_u64..9, 0_i32..5), 1..8),
        units in 1_u64..17,
        proposed in proptest::collection::vec(0_usize..8, 1..4),
    ) {
        let mut ledger = ledger(&[]);
        let mut all = Vec::new();
        for (number, (gpu, units, priority)) in pods.iter().enumerate() {
            let pod = Pod { priority: *priority, ..divvy_pod(&format!("p{number}"), "n1", *gpu, *units) };
            if ledger.choose_at("n1", &[*gpu], &ask(*units)).is_ok() {
                ledger.apply_pod(pod.clone());
                all.push(pod);
            }
        }
        let pod = Pod { priority: 3, ..pending("urgent", units) };
        let proposed: Vec<String> = all.iter().enumerate()
            .filter(|(at, other)| proposed.contains(at) && other.priority < 3)
            .map(|(_, other)| other.uid.clone()).collect();
        let fits = |gone: &[String]| {
            let mut left = ledger.clone();
            gone.iter().for_each(|uid| { left.delete_pod(uid); });
            left.choose("n1", &ask(units)).is_ok()
        };
        let lower: Vec<String> = all.iter().filter(|other| other.priority < 3).map(|other| other.uid.clone()).collect();
        match ledger.victims("n1", &pod, &proposed) {
            None => prop_assert!(!fits(&lower), "there was a way"),
            Some(victims) => {
                prop_assert!(fits(&victims));
                prop_assert!(victims.iter().all(|uid| lower.contains(uid)));
                // If a GPU has room already, all proposed pods stay victims.
                for without in 0..victims.len() {
                    let mut fewer = victims.clone();
                    fewer.remove(without);
                    prop_assert!(fits(&[]) || !fits(&fewer), "{} could have stayed", victims[without]);
                }
            }
        }
    }
}

#[test]
fn two_nominated_pods_keep_their_room() {
    for [on_two, on_one] in [["a", "b"], ["b", "a"]] {
        let mut ledger = Ledger::new(GIB);
        ledger.apply_node(&divvy_node("n1", &[3, 4, 4]));
        let nominated = |name, gpus| {
            let mut pod = Pod {
                nominated: Some("n1".into()),
                priority: 1000,
                ..pending(name, 4)
            };
            let rules = GpuRules {
                gpus: Some(gpus),
                ..GpuRules::default()
            };
            pod.request.rules = Some(Arc::new(Ok(rules)));
            pod
        };
        let pods = [nominated(on_two, 2), nominated(on_one, 1)];
        for pod in &pods {
            ledger.apply_pod(pod.clone());
        }
        // Best fit alone would choose the two GPUs of 4 GiB.
        for pod in pods {
            let choice = ledger.choose("n1", &Ask::of_pod(&pod, GIB)).expect("room");
            ledger.apply_pod(Pod {
                held: choice.held(&pod.request, GIB),
                node: Some("n1".to_owned()),
                nominated: None,
                ..pod
            });
        }
    }
}
