//! Shares of the compute time of GPUs (`divvy.dev/gpu-cores`).

use std::sync::Arc;

use divvy_model::{Enforcement, GpuRules, Held, Isolation, Pod};
use divvy_placement::{Ask, Ledger, NodeRefusal, Reservation, Standing, Taste};
use proptest::prelude::*;

use crate::fixture::*;

/// Return a ledger with n1, which has GPUs of 16 units on which the guard enforces shares.
fn ledger(gpus: usize) -> Ledger {
    let mut ledger = Ledger::new(GIB);
    let mut node = divvy_node("n1", &vec![16; gpus]);
    for gpu in 0..gpus {
        edit_gpu(&mut node, gpu, |gpu| gpu.enforcement = Some(Enforcement::GUARD));
    }
    ledger.apply_node(&node);
    ledger
}

fn rules(cores: u32, gpus: u32, isolation: Option<Isolation>) -> GpuRules {
    GpuRules {
        gpus: Some(gpus),
        cores: (cores > 0).then_some(cores),
        isolation,
        ..GpuRules::default()
    }
}

/// Return a pod that requests these units in total and this share of the compute time of each of its GPUs; 0 for no share.
fn wanting(name: &str, units: u64, cores: u32, gpus: u32) -> Pod {
    let mut pod = pending(name, units);
    pod.request.rules = Some(Arc::new(Ok(rules(cores, gpus, None))));
    pod
}

/// Bind a pod to the GPUs that it gets now. Return their indices, or the refusal.
fn place(ledger: &mut Ledger, pod: Pod) -> Result<Vec<u32>, NodeRefusal> {
    let choice = ledger.choose("n1", &Ask::of_pod(&pod, GIB))?;
    let held = choice.held(&pod.request, GIB);
    ledger.apply_pod(Pod {
        held,
        node: Some("n1".to_owned()),
        ..pod
    });
    Ok(choice.gpus.iter().map(|gpu| gpu.index).collect())
}

fn used(ledger: &Ledger) -> Vec<u32> {
    let view = ledger.node("n1").expect("known");
    (0..view.state().map_or(0, |state| state.gpus.len()))
        .map(|position| view.used_cores(position))
        .collect()
}

/// Pods without a share of the compute time do not count.
#[test]
fn a_gpus_compute_shares_never_exceed_100_percent() {
    let mut ledger = ledger(2);
    assert_eq!(place(&mut ledger, wanting("a", 2, 60, 1)), Ok(vec![0]));
    assert_eq!(place(&mut ledger, wanting("b", 2, 40, 1)), Ok(vec![0]));
    assert_eq!(
        place(&mut ledger, wanting("c", 2, 1, 1)),
        Ok(vec![1]),
        "GPU 0 has memory, and no compute time"
    );
    assert_eq!(place(&mut ledger, wanting("d", 2, 0, 1)), Ok(vec![0]));
    let mut refusal = |pod: Pod| place(&mut ledger, pod).expect_err("no room").filter_message("n1");
    assert_eq!(
        refusal(wanting("e", 2, 100, 1)),
        "no GPU with 2048 MiB and 100 % of the compute time free"
    );
    assert_eq!(
        refusal(wanting("f", 4, 50, 2)),
        "fewer than 2 GPUs with 2048 MiB and 50 % of the compute time of each free"
    );
    assert_eq!(used(&ledger), [100, 1]);
    assert!(ledger.delete_pod("u-a"));
    assert_eq!(place(&mut ledger, wanting("f", 4, 50, 2)), Ok(vec![0, 1]));
    assert_eq!(used(&ledger), [90, 51]);
}

#[test]
fn an_allocation_names_the_share_and_its_enforcement() {
    let of = |rules: GpuRules| {
        let mut pod = pending("a", 4);
        pod.request.rules = Some(Arc::new(Ok(rules)));
        let choice = ledger(2).choose("n1", &Ask::of_pod(&pod, GIB)).expect("room");
        let Held::Allocation(allocation) = choice.held(&pod.request, GIB) else {
            panic!("an allocation");
        };
        let shares = allocation.gpus.iter().map(|share| (share.cores, share.enforcement));
        let containers = allocation.containers.values().flatten().map(|share| share.cores);
        (shares.collect::<Vec<_>>(), containers.collect::<Vec<_>>())
    };
    let guard = Some(Enforcement::GUARD);
    assert_eq!(of(rules(30, 2, None)), (vec![(30, guard); 2], vec![30; 2]));
    assert_eq!(of(rules(0, 1, None)), (vec![(0, guard)], vec![0]));
    assert_eq!(of(rules(30, 1, Some(Isolation::None))), (vec![(30, None)], vec![30]));
}

#[test]
fn a_refusal_says_how_much_compute_time_each_gpu_has_left() {
    let mut ledger = ledger(2);
    place(&mut ledger, wanting("a", 4, 90, 2)).expect("room");
    let text = |pod: &Pod| ledger.explain("n1", &Ask::of_pod(pod, GIB)).to_string();
    assert_eq!(
        text(&wanting("b", 3, 30, 1)),
        "node n1 has no GPU on which compute time is limited (gpu-cores: 30) that has 3 units (3072 MiB) and 30 % of the compute time free: \
         GPU 0 has 14336 of 16384 MiB and 10 % of its compute time free, GPU 1 has 14336 of 16384 MiB and 10 % of its compute time free"
    );
    assert_eq!(
        text(&wanting("b", 3, 10, 1)),
        "node n1 has room for 3 units (3072 MiB) and 10 % of the compute time on a GPU on which compute time is limited (gpu-cores: 10) on GPU 0"
    );
    let mut plain = Ledger::new(GIB);
    plain.apply_node(&divvy_node("n1", &[16]));
    let refusal = plain
        .choose("n1", &Ask::of_pod(&wanting("b", 3, 30, 1), GIB))
        .expect_err("nothing limits it");
    assert_eq!(
        refusal.filter_message("n1"),
        "no GPU on which compute time is limited (gpu-cores: 30)"
    );
}

/// Bind a pod with this priority to GPU 0 of n1.
fn on_gpu_0(ledger: &mut Ledger, name: &str, units: u64, cores: u32, priority: i32) {
    let mut pod = divvy_pod(name, "n1", 0, units);
    pod.priority = priority;
    if let Held::Allocation(allocation) = &mut pod.held {
        allocation.gpus[0].cores = cores;
    }
    ledger.apply_pod(pod);
}

/// No pod is evicted if its eviction does not help.
#[test]
fn victims_free_compute_time_and_memory() {
    let check = |pods: &[(&str, u64, u32)], (units, cores): (u64, u32), expected: &[&str]| {
        let mut ledger = ledger(1);
        for (name, units, cores) in pods {
            on_gpu_0(&mut ledger, name, *units, *cores, 0);
        }
        let urgent = Pod {
            priority: 1000,
            ..wanting("urgent", units, cores, 1)
        };
        let in_the_way = ledger.in_the_way("n1", &urgent).expect("pods of lower priority are enough");
        let mut names: Vec<&str> = in_the_way.pods.iter().map(|pod| pod.name.as_str()).collect();
        names.sort_unstable();
        assert_eq!(names, expected, "{units} units and {cores} % beside {pods:?}");
    };
    // Memory is free. The largest pod has no compute time.
    check(&[("large", 8, 0), ("busy", 2, 60), ("calm", 2, 30)], (2, 45), &["busy"]);
    check(&[("large", 8, 0), ("busy", 2, 60), ("calm", 2, 30)], (2, 40), &["calm"]);
    check(
        &[("large", 8, 0), ("busy", 2, 60), ("calm", 2, 30)],
        (2, 90),
        &["busy", "calm"],
    );
    // Both are missing.
    check(
        &[("large", 12, 0), ("busy", 2, 60), ("calm", 2, 30)],
        (8, 50),
        &["busy", "large"],
    );
    check(
        &[("large", 12, 10), ("busy", 2, 60), ("calm", 2, 30)],
        (4, 100),
        &["busy", "calm", "large"],
    );
    // Only memory is missing.
    check(&[("large", 12, 0), ("busy", 2, 60), ("calm", 2, 0)], (8, 20), &["large"]);
}

/// Compute time is also kept for a pod that is being bound.
#[test]
fn compute_time_is_kept_for_nominated_pods() {
    let mut nominating = ledger(1);
    let mut urgent = wanting("urgent", 2, 80, 1);
    (urgent.priority, urgent.nominated) = (1000, Some("n1".into()));
    nominating.apply_pod(urgent.clone());
    let fits = |ledger: &Ledger, pod: &Pod| ledger.fits("n1", &Ask::of_pod(pod, GIB), &pod.uid).is_ok();
    assert!(!fits(&nominating, &wanting("b", 2, 30, 1)));
    assert!(fits(&nominating, &wanting("b", 2, 20, 1)) && fits(&nominating, &urgent));

    let mut reserving = ledger(1);
    let a = wanting("a", 2, 80, 1);
    let held = reserving
        .choose("n1", &Ask::of_pod(&a, GIB))
        .expect("room")
        .held(&a.request, GIB);
    let reservation = Reservation {
        pod: a.key(),
        held,
        earlier: Vec::new(),
        standing: Standing::InFlight,
        since_ns: 0,
    };
    reserving.reserve(&a.uid, "n1", reservation);
    assert!(!fits(&reserving, &wanting("b", 2, 30, 1)));
    assert!(reserving.reserved_and_good(&a.uid, "n1").is_some() && fits(&reserving, &a));
    on_gpu_0(&mut reserving, "forged", 1, 30, 0);
    assert!(
        reserving.reserved_and_good(&a.uid, "n1").is_none(),
        "the GPU has too little left"
    );
}

proptest! {
    /// The share of a pod that goes is free again, and whatever fits is what a recount from the pods says.
    /// Room is never denied to a pod that fits, no matter which pods come and go.
    #[test]
    fn no_gpu_ever_has_more_than_100_percent(
        steps in proptest::collection::vec((0..12_u8, 0..5_u64, prop_oneof![Just(0), 1..=100_u32], 1..=2_u32), 1..60)
    ) {
        let mut ledger = ledger(3);
        let mut bound: std::collections::BTreeMap<u8, (Vec<u32>, u64, u32)> = std::collections::BTreeMap::new();
        for (name, units, cores, gpus) in steps {
            if bound.remove(&name).is_some() {
                ledger.delete_pod(&format!("u-p{name}"));
                continue;
            }
            let pod = wanting(&format!("p{name}"), (units + 1) * u64::from(gpus), cores, gpus);
            let sum = |index: u32, of: fn(&(Vec<u32>, u64, u32)) -> u64| -> u64 {
                bound.values().filter(|bound| bound.0.contains(&index)).map(of).sum()
            };
            let fitting = (0..3_u32).filter(|index| {
                sum(*index, |bound| bound.1) + units < 16
                    && (cores == 0 || sum(*index, |bound| u64::from(bound.2)) + u64::from(cores) <= 100)
            });
            let expected = fitting.count() >= gpus as usize;
            let ask = Ask::of_pod(&pod, GIB);
            prop_assert_eq!(ledger.fits("n1", &ask, &pod.uid).is_ok(), expected);
            let view = ledger.node("n1").expect("known");
            prop_assert_eq!(view.best(&Taste::of(&ask)).is_ok(), expected);
            prop_assert_eq!(ledger.room("n1", &ask).fitting >= gpus as usize, expected);
            let placed = place(&mut ledger, pod);
            prop_assert_eq!(placed.is_ok(), expected);
            if let Ok(indices) = placed {
                bound.insert(name, (indices, units + 1, cores));
            }
            prop_assert!(used(&ledger).iter().all(|used| *used <= 100));
        }
    }
}
