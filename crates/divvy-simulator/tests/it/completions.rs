//! Tests of simulations in which pods end.

use divvy_policy::Policy;
use divvy_simulator::{Completions, Order, Trace, turn_over};

fn trace() -> Trace {
    let nodes = (0..12).map(|node| format!("n{node},{},65536,{},T4\n", 16000 + 8000 * (node % 3), 2 + 2 * (node % 4)));
    let nodes = format!("sn,cpu_milli,memory_mib,gpu,model\n{}", nodes.collect::<String>());
    let pods = "name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,2000,1024,1,300\nb,4000,2048,1,1000\nc,1000,512,1,700\nd,8000,8192,8,1000\ne,3000,4096,0,0\n";
    Trace::read(nodes.as_bytes(), pods.as_bytes()).expect("a trace")
}

#[test]
fn gpu_time_is_conserved_and_the_same_seed_gives_the_same_run() {
    let trace = trace();
    let ranks = Order::ranks_by_name(&trace);
    for policy in Policy::ALL {
        for load_percent in [60, 130] {
            let setting = Completions {
                warm_up: 500,
                counted: 2000,
                ..Completions::at(load_percent, 3)
            };
            let run = turn_over(&trace, &ranks, policy, &setting).expect("a load");
            assert_eq!(run.had, run.used_in_all, "{policy} at {load_percent}");
            assert!(run.used > 0 && run.used <= run.capacity, "{policy} at {load_percent}");
            assert_eq!(
                run,
                turn_over(&trace, &ranks, policy, &setting).expect("a load"),
                "{policy} at {load_percent}"
            );
            assert_ne!(
                run,
                turn_over(&trace, &ranks, policy, &Completions { seed: 4, ..setting }).expect("a load"),
                "{policy}"
            );
        }
    }
}

#[test]
fn without_losses_what_is_used_is_the_load() {
    let mut trace = trace();
    trace.pods.retain(|pod| pod.demand.gpus < 8);
    let ranks = Order::ranks_by_name(&trace);
    let setting = Completions {
        warm_up: 2000,
        counted: 50_000,
        ..Completions::at(20, 1)
    };
    let run = turn_over(&trace, &ranks, Policy::BestFit, &setting).expect("a load");
    assert_eq!(run.lost_milli, 0);
    assert!((run.used_percent() - 20.0).abs() < 1.0, "{:.2}", run.used_percent());
}
