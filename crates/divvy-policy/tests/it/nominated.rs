//! Tests of the room that is kept for nominated pods, which have preempted others.

use divvy_model::{GpuRules, Health, MiB, Pod, PodRequest};
use divvy_placement::{Ask, Ledger, Reservation, Standing};
use divvy_policy::{CacheLimits, Fleet, Policy};
use proptest::prelude::*;

use crate::fixture::*;

fn with_priority(name: &str, units: u64, priority: i32) -> Pod {
    Pod {
        priority,
        ..pending(name, units)
    }
}

fn nominated(name: &str, units: u64, priority: i32) -> Pod {
    Pod {
        nominated: Some("n1".into()),
        ..with_priority(name, units, priority)
    }
}

/// A ledger with the node n1, which has two GPUs of 16 units, and with these pods.
fn ledger(pods: &[Pod]) -> Ledger {
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n1", &[16, 16]);
    (node.cpu_milli, node.memory_bytes, node.pods) = (8_000, 64 << 30, 110);
    ledger.apply_node(&node);
    for pod in pods {
        ledger.apply_pod(pod.clone());
    }
    ledger
}

/// Return the GPU that the pod gets by best fit, or `None` if it has no room. Check that `Ledger::fits` and the policy agree
/// on whether it has room.
fn gpu_for(ledger: &Ledger, pod: &Pod) -> Option<u32> {
    let ask = Ask::of_pod(pod, GIB);
    let choice = ledger.choose("n1", &ask).ok().map(|choice| choice.gpus[0].index);
    assert_eq!(ledger.fits("n1", &ask, &pod.uid).is_ok(), choice.is_some(), "{}", pod.name);
    let mut fleet = Fleet::new(Policy::default(), CacheLimits::SMALL);
    fleet.follow(ledger);
    assert_eq!(
        fleet.choose(pod, &ask, "n1", ledger).is_some(),
        choice.is_some(),
        "{}",
        pod.name
    );
    choice
}

#[test]
fn a_victims_replacement_does_not_get_its_gpu() {
    // GPU 0 has 6 units left. The victim on GPU 1 has ended: 16 units are left, of which 12 are kept.
    let mut ledger = ledger(&[divvy_pod("rest", "n1", 0, 10), nominated("high", 12, 1000)]);
    assert_eq!(gpu_for(&ledger, &with_priority("replacement", 10, 0)), None);
    assert_eq!(
        gpu_for(&ledger, &with_priority("equal", 10, 1000)),
        None,
        "first come, first served"
    );
    assert_eq!(gpu_for(&ledger, &with_priority("higher", 10, 1001)), Some(1));
    assert_eq!(gpu_for(&ledger, &nominated("high", 12, 1000)), Some(1), "it is kept for it");
    assert_eq!(gpu_for(&ledger, &with_priority("small", 6, 0)), Some(0));
    assert_eq!(
        gpu_for(&ledger, &with_priority("tiny", 4, 0)),
        Some(1),
        "next to the memory that is kept, by best fit"
    );

    // Bound, nominated elsewhere, or gone: nothing is kept here any longer.
    for after in [
        Some(divvy_pod("high", "n1", 1, 12)),
        Some(with_priority("high", 12, 1000)),
        Some(Pod {
            nominated: Some("n2".into()),
            ..with_priority("high", 12, 1000)
        }),
        None,
    ] {
        let mut ledger = ledger.clone();
        match after.clone() {
            Some(pod) => ledger.apply_pod(pod),
            None => ledger.delete_pod("u-high"),
        };
        let bound = after.is_some_and(|pod| pod.node.is_some());
        assert_eq!(gpu_for(&ledger, &with_priority("replacement", 10, 0)), (!bound).then_some(1));
        ledger.delete_pod("u-high");
        ledger.delete_pod("u-rest");
        ledger.delete_node("n1");
        assert_eq!(ledger.nodes().count(), 0, "nothing is remembered");
    }

    // While the victim ends, its memory is kept on its GPU and not on the other one.
    let ending = Pod {
        deleting: true,
        ..divvy_pod("victim", "n1", 1, 10)
    };
    ledger.apply_pod(ending);
    assert_eq!(gpu_for(&ledger, &with_priority("small", 6, 0)), Some(0));
    assert_eq!(gpu_for(&ledger, &with_priority("tiny", 1, 0)), Some(0));
    ledger.apply_pod(with_priority("high", 12, 1000));
    assert_eq!(gpu_for(&ledger, &with_priority("tiny", 1, 0)), Some(0));
    assert_eq!(gpu_for(&ledger, &with_priority("six", 6, 0)), Some(0));
}

#[test]
fn an_unknown_bind_elsewhere_ends_no_nomination() {
    let mut ledger = ledger(&[divvy_pod("rest", "n1", 0, 10), nominated("high", 12, 1000)]);
    ledger.apply_node(&divvy_node("n2", &[16]));
    let reservation = |node: &str| Reservation {
        pod: nominated("high", 12, 1000).key(),
        held: divvy_pod("high", node, 0, 12).held,
        earlier: Vec::new(),
        standing: Standing::Doubt,
        since_ns: 0,
    };
    ledger.reserve("u-high", "n2", reservation("n2"));
    // A change on n1 makes the ledger compute its nominations again.
    ledger.apply_pod(divvy_pod("more", "n1", 0, 1));
    assert_eq!(gpu_for(&ledger, &with_priority("replacement", 10, 0)), None, "kept");
    // On the node itself the reservation is counted, and nothing is kept in addition.
    ledger.delete_pod("u-rest");
    ledger.delete_pod("u-more");
    ledger.reserve("u-high", "n1", reservation("n1"));
    assert_eq!(gpu_for(&ledger, &with_priority("replacement", 16, 0)), Some(1));
}

/// A force-deleted victim no longer has an object, but its containers will end soon.
#[test]
fn what_gone_pods_containers_hold_is_kept() {
    let running = Pod {
        container_running: true,
        ..divvy_pod("victim", "n1", 1, 10)
    };
    let high = nominated("high", 12, 1000);
    let replacement = with_priority("replacement", 6, 0);
    let mut held = divvy_node("n1", &[16, 16]);
    edit_gpu(&mut held, 1, |gpu| gpu.held = MiB(10 * 1024));
    // A pod of lower priority on GPU 0 changes nothing, because no one has evicted it.
    for rest in [1000, 0] {
        let rest = Pod {
            priority: rest,
            ..divvy_pod("rest", "n1", 0, 16)
        };
        let mut departed = ledger(&[rest.clone(), running.clone(), high.clone()]);
        departed.delete_pod("u-victim");
        assert_eq!(departed.departed().count(), 1);
        let mut spoken = ledger(&[rest, high.clone()]);
        spoken.apply_node(&held);
        for ledger in [departed, spoken] {
            assert_eq!(gpu_for(&ledger, &replacement), None);
            assert_eq!(gpu_for(&ledger, &with_priority("higher", 6, 1001)), Some(1));
        }
    }
    // Pods that are being deleted come first, because they are the likelier victims.
    let leaving = Pod {
        deleting: true,
        ..divvy_pod("leaving", "n1", 0, 8)
    };
    let mut ledger = ledger(&[leaving, high]);
    ledger.apply_node(&held);
    assert_eq!(gpu_for(&ledger, &replacement), Some(1));
}

/// The second preemptor does not count on the GPU that is kept for the first.
#[test]
fn two_nominated_pods_are_kept_different_gpus() {
    let pods = [nominated("one", 12, 1000), nominated("two", 12, 1000)];
    let both = ledger(&pods);
    assert_eq!(gpu_for(&both, &with_priority("other", 5, 0)), None);
    assert_eq!(gpu_for(&both, &with_priority("other", 4, 0)), Some(0));
    // GPU 1 is being made free for `one`. For `two` the pod on GPU 0 would have to go.
    let ending = Pod {
        deleting: true,
        ..divvy_pod("victim", "n1", 1, 16)
    };
    let first = ledger(&[divvy_pod("rest", "n1", 0, 16), ending, nominated("one", 12, 1000)]);
    let proposed = ["u-rest".to_owned(), "u-victim".to_owned()];
    let victims = |pod: &Pod| first.victims("n1", pod, &proposed);
    assert_eq!(victims(&with_priority("two", 12, 1000)), Some(vec!["u-rest".to_owned()]));
    assert_eq!(victims(&nominated("one", 12, 1000)), Some(vec!["u-victim".to_owned()]));
    assert_eq!(victims(&with_priority("above", 12, 1001)), Some(vec!["u-victim".to_owned()]));
}

/// GPU 0 has room for one share of each pod. The two tightest GPUs together have room for only one of the pods.
#[test]
fn all_nominated_pods_of_several_gpus_have_room() {
    let both = |name: &str| {
        let rules = GpuRules {
            gpus: Some(2),
            ..GpuRules::default()
        };
        let mut pod = nominated(name, 4, 1000);
        pod.request = PodRequest::new(pod.request.containers, Some(Ok(rules)));
        pod
    };
    let (one, two) = (both("one"), both("two"));
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("n1", &[6, 4, 4]));
    for pod in [&divvy_pod("a", "n1", 1, 2), &divvy_pod("b", "n1", 2, 2), &one, &two] {
        ledger.apply_pod(pod.clone());
    }
    assert_eq!(gpu_for(&ledger, &with_priority("other", 3, 0)), None);
    assert_eq!(gpu_for(&ledger, &with_priority("other", 2, 0)), Some(0));
    for (first, second) in [(&one, &two), (&two, &one)] {
        let mut ledger = ledger.clone();
        for pod in [first, second] {
            let choice = ledger.choose("n1", &Ask::of_pod(pod, GIB)).expect("its room was kept");
            ledger.apply_pod(Pod {
                node: Some("n1".into()),
                nominated: None,
                held: choice.held(&pod.request, GIB),
                ..pod.clone()
            });
        }
    }
}

/// If the pod that takes two GPUs got the roomiest ones, the pod with the next priority would have no room. The last pod has no
/// room either way.
#[test]
fn best_fit_stays_for_a_more_important_pod() {
    let rules = GpuRules {
        gpus: Some(2),
        ..GpuRules::default()
    };
    let mut both = nominated("both", 4, 1002);
    both.request = PodRequest::new(both.request.containers, Some(Ok(rules)));
    let mut ledger = Ledger::new(GIB);
    ledger.apply_node(&divvy_node("n1", &[6, 2, 2]));
    for pod in [both, nominated("large", 5, 1001), nominated("never", 9, 1000)] {
        ledger.apply_pod(pod);
    }
    assert_eq!(gpu_for(&ledger, &with_priority("other", 1, 0)), Some(0));
    assert_eq!(
        gpu_for(&ledger, &with_priority("other", 2, 0)),
        None,
        "5 of GPU 0 are kept for `large`"
    );
}

#[test]
fn why_names_the_pod_for_which_memory_is_kept() {
    let ledger = ledger(&[divvy_pod("rest", "n1", 0, 10), nominated("high", 12, 1000)]);
    let report = ledger.explain("n1", &Ask::of_pod(&with_priority("replacement", 10, 0), GIB));
    insta::assert_snapshot!(report, @"node n1 has no GPU with 10 units (10240 MiB) free: GPU 0 has 6144 of 16384 MiB free, GPU 1 has 4096 of 16384 MiB free and keeps 12288 MiB for pod default/high, which has priority 1000 and is nominated to this node");
    // The nominated pod gets its share of the freed memory first.
    let mut part = ledger.only("n1");
    part.end_pod(&divvy_pod("rest", "n1", 0, 10).uid);
    let other = Ask::of_pod(&with_priority("replacement", 16, 0), GIB);
    assert_eq!(part.room("n1", &other), ledger_without_rest().room("n1", &other));
}

/// The ledger as if the pod `rest` had never existed.
fn ledger_without_rest() -> Ledger {
    ledger(&[nominated("high", 12, 1000)])
}

/// A nominated pod that requests nothing keeps nothing either.
#[test]
fn a_nominated_pod_that_fits_nowhere_keeps_nothing() {
    let mut failed = divvy_node("n1", &[16, 16]);
    edit_gpu(&mut failed, 1, |gpu| gpu.health = Health::Failed);
    let mut ledger = ledger(&[
        nominated("large", 17, 1000),
        nominated("none", 0, 1000),
        Pod {
            deleting: true,
            ..nominated("going", 16, 1000)
        },
    ]);
    assert_eq!(gpu_for(&ledger, &with_priority("other", 16, 0)), Some(0));
    ledger.apply_node(&failed);
    ledger.apply_pod(nominated("high", 16, 1000));
    assert_eq!(
        gpu_for(&ledger, &with_priority("other", 1, 0)),
        None,
        "GPU 0 is kept, GPU 1 has failed"
    );
}

proptest! {
    /// A pod of lower priority that fits leaves room for a nominated pod that had room before.
    #[test]
    fn a_pod_that_fits_takes_no_room_from_a_nominated_pod(
        sizes in proptest::collection::vec(1..12u64, 0..2),
        bound in proptest::collection::vec((0..2usize, 1..8u64), 0..4),
        units in 1..16u64,
    ) {
        let mut ledger = ledger(&[]);
        for (i, (gpu, units)) in bound.iter().enumerate() {
            ledger.apply_pod(divvy_pod(&format!("b{i}"), "n1", *gpu, *units));
        }
        let waiting: Vec<Pod> = sizes.iter().enumerate().map(|(i, units)| nominated(&format!("w{i}"), *units, 5)).collect();
        // Only pods that have room next to each other, because preemption makes only such room.
        let mut placed = ledger.clone();
        for pod in &waiting {
            if let Some(gpu) = placed.choose("n1", &Ask::of(&pod.request, GIB)).ok().map(|choice| choice.gpus[0].index) {
                placed.apply_pod(divvy_pod(&pod.name, "n1", gpu as usize, pod.request.containers[0].units));
                ledger.apply_pod(pod.clone());
            }
        }
        let asker = pending("asker", units);
        if let Some(gpu) = gpu_for(&ledger, &asker) {
            ledger.apply_pod(divvy_pod("asker", "n1", gpu as usize, units));
            for pod in &waiting {
                if ledger.pod(&pod.uid).is_none() {
                    continue;
                }
                let gpu = gpu_for(&ledger, pod);
                prop_assert!(gpu.is_some(), "{} has no room any more", pod.name);
                ledger.apply_pod(divvy_pod(&pod.name, "n1", gpu.unwrap_or(0) as usize, pod.request.containers[0].units));
            }
        }
    }
}
