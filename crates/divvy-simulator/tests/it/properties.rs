//! Properties that hold for every trace.

use divvy_policy::Policy;
use divvy_simulator::{Completions, Lifetimes, Order, Setting, Trace, inflate, replay, turn_over};
use proptest::prelude::*;

const MODELS: [&str; 3] = ["T4", "A10", "A10|T4"];

/// CPU, number of GPUs, model.
type NodeRow = (u32, u8, usize);
/// CPU, size, models, time of arrival, lifetime.
type PodRow = (u32, usize, usize, u64, u64);

prop_compose! {
    fn node()(cpu in 1..5_u32, gpus in 0..5_u8, model in 0..2_usize) -> NodeRow {
        (8000 * cpu, gpus, model)
    }
}

prop_compose! {
    fn pod()(cpu in 0..9_u32, kind in 0..6_usize, model in 0..9_usize, from in 0..500_u64, for_ in 0..300_u64) -> PodRow {
        (1000 * cpu, kind, model, from, for_)
    }
}

/// Create a trace. Each row's name comes from its number, so that the same rows in another order describe the same nodes and
/// pods.
fn trace(nodes: &[(usize, NodeRow)], pods: &[(usize, PodRow)]) -> Trace {
    let mut node_rows = "sn,cpu_milli,memory_mib,gpu,model\nfull,64000,65536,4,T4\n".to_owned();
    for (row, (cpu, gpus, model)) in nodes {
        node_rows += &format!("n{row},{cpu},65536,{gpus},{}\n", MODELS[*model]);
    }
    let mut pod_rows =
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time,deletion_time\nfirst,100,1,1,500,,0,10\n".to_owned();
    for (row, (cpu, kind, model, from, for_)) in pods {
        let (gpus, milli) = [(0, 0), (1, 100), (1, 470), (1, 1000), (2, 1000), (4, 1000)][*kind];
        let spec = MODELS.get(*model).unwrap_or(&"");
        pod_rows += &format!("p{row},{cpu},64,{gpus},{milli},{spec},{from},{}\n", from + for_);
    }
    Trace::read(node_rows.as_bytes(), pod_rows.as_bytes()).expect("a trace")
}

fn numbered<T: Copy>(rows: &[T]) -> Vec<(usize, T)> {
    rows.iter().copied().enumerate().collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn gpu_time_is_conserved(
        nodes in prop::collection::vec(node(), 1..12),
        pods in prop::collection::vec(pod(), 1..40),
        load in 1..200_u32,
        seed: u64,
        fill in 0..120_u32,
        of_trace: bool,
    ) {
        let trace = trace(&numbered(&nodes), &numbered(&pods));
        let ranks = Order::ranks_by_name(&trace);
        let completions = Completions {
            lifetimes: if of_trace { Lifetimes::Trace } else { Lifetimes::Exponential },
            warm_up: 40,
            counted: 120,
            fill_percent: fill,
            flood_percent: fill / 2,
            ..Completions::at(load, seed)
        };
        for policy in Policy::ALL {
            let run = turn_over(&trace, &ranks, policy, &completions).expect("a load");
            prop_assert_eq!(run.had, run.used_in_all, "{}", policy);
            prop_assert!(run.used <= run.capacity && run.lost_milli <= run.asked_milli);
            prop_assert!(run.filled_milli <= trace.capacity_milli() && run.flooded_milli <= trace.capacity_milli());
            prop_assert_eq!(run.pods().asked, 120);
            let run = replay(&trace, &ranks, policy).expect("times");
            prop_assert_eq!(run.had, run.used_in_all, "{}", policy);
            prop_assert_eq!(run.pods().asked as usize, trace.pods.len());
        }
    }

    #[test]
    fn the_order_of_rows_does_not_matter_where_names_decide(
        nodes in prop::collection::vec(node(), 1..12).prop_map(|nodes| numbered(&nodes)),
        pods in prop::collection::vec(pod(), 1..40).prop_map(|pods| numbered(&pods)),
        seed: u64,
    ) {
        let one = trace(&nodes, &pods);
        let reversed = |rows: &[_]| rows.iter().rev().copied().collect::<Vec<_>>();
        let other = trace(&reversed(&nodes), &pods.iter().rev().copied().collect::<Vec<_>>());
        let order = |trace: &Trace, arrivals: Vec<usize>| Order { arrivals, ranks: Order::ranks_by_name(trace) };
        let arrivals = Order::shuffled(&one, seed, 130).arrivals;
        let row = |name: &str| other.pods.iter().position(|pod| pod.name == name).expect("the same pods");
        let theirs = arrivals.iter().map(|at| row(&one.pods[*at].name)).collect();
        let (ours, theirs) = (order(&one, arrivals), order(&other, theirs));
        for policy in Policy::ALL {
            prop_assert_eq!(inflate(&one, &ours, policy), inflate(&other, &theirs, policy), "{}", policy);
        }
    }

    /// The order stops before the pods request more than the given percentage of the capacity.
    #[test]
    fn a_shuffled_order_has_each_pod_once_first(
        nodes in prop::collection::vec(node(), 1..12),
        pods in prop::collection::vec(pod(), 1..40),
        seed: u64,
        percent in 1..300_u32,
    ) {
        let trace = trace(&numbered(&nodes), &numbered(&pods));
        let order = Order::shuffled(&trace, seed, percent);
        let most = trace.capacity_milli() * u64::from(percent) / 100;
        let asked: u64 = order.arrivals.iter().map(|row| trace.pods[*row].gpu_milli()).sum();
        prop_assert!(asked <= most);
        let mut first: Vec<usize> = order.arrivals.iter().copied().take(trace.pods.len()).collect();
        first.sort_unstable();
        first.dedup();
        prop_assert_eq!(first.len(), order.arrivals.len().min(trace.pods.len()));
        let mut ranks = order.ranks.clone();
        ranks.sort_unstable();
        prop_assert!(ranks.into_iter().eq(0..trace.nodes.len() as u64));
        prop_assert_eq!(&order, &Order::shuffled(&trace, seed, percent));
    }
}

/// Check the last numbers of an order, so that no one changes the random numbers by accident. Published orders must stay the
/// same.
#[test]
fn the_order_of_a_seed_stays_what_it_is() {
    let nodes: Vec<_> = (0..6).map(|row| (8000, 2, row % 2)).collect();
    let pods: Vec<_> = (0..8).map(|row| (1000, row % 6, 9, 0, 1)).collect();
    let order = Order::shuffled(&trace(&numbered(&nodes), &numbered(&pods)), 42, 100);
    assert_eq!(order.arrivals, [5, 8, 4, 3, 0, 2, 7, 1, 6, 3, 5, 1, 4, 4, 4, 5, 1]);
    assert_eq!(order.ranks, [2, 1, 5, 4, 6, 0, 3]);
}

/// A policy that has learned nothing still places pods.
#[test]
fn the_hardware_order_groups_alike_nodes() {
    let nodes: Vec<_> = (0..8).map(|row| (8000, 2, row % 2)).collect();
    let pods: Vec<_> = (0..20).map(|row| (1000, row % 6, 9, 0, 1)).collect();
    let trace = trace(&numbered(&nodes), &numbered(&pods));
    let ranks = Order::ranks_by_hardware(&trace);
    let mut rows: Vec<usize> = (0..trace.nodes.len()).collect();
    rows.sort_by_key(|row| ranks[*row]);
    let shapes: Vec<_> = rows.iter().map(|row| trace.nodes[*row].shape).collect();
    let mut changes = shapes.windows(2).filter(|pair| pair[0] != pair[1]);
    assert_eq!(changes.by_ref().count(), 2, "three kinds");
    let order = Order {
        ranks,
        ..Order::shuffled(&trace, 1, 80)
    };
    let setting = Setting {
        learn_from: Some(0),
        ..Setting::from(Policy::Divvy)
    };
    assert!(inflate(&trace, &order, setting).placed > 0);
}
