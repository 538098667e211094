//! Replays the openb traces and prints the mean over the seeds, and how long decisions took.
//!
//! `cargo run --release -p divvy-simulator --example openb -- FOLDER [POLICY,… [LIST,… [SEED,… [LOAD,…]]]]`
//!
//! With loads (in percent) pods end, and what is printed is GPU in use and lost.

#![allow(clippy::print_stdout)]

use std::fs;
use std::path::Path;
use std::time::Instant;

use divvy_placement::policy::Policy;
use divvy_simulator::{Completions, Order, Trace, inflate, turn_over};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let list = |at: usize, default: &str| -> Vec<String> {
        let text = arguments.get(at).map_or(default, String::as_str);
        text.split(',').map(str::to_owned).collect()
    };
    let folder = Path::new(arguments.first().expect("a folder with the openb traces"));
    let read = |name: &str| fs::read(folder.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    println!(
        "{:<12} {:<15} {:>7} {:>7} {:>7} {:>9}",
        "list", "policy", "at 95", "at 100", "at 130", "seconds"
    );
    for name in list(2, "default,cpu100,gpushare40,gpushare100") {
        let pods = read(&format!("openb_pod_list_{name}.csv.gz"));
        let trace = Trace::read(&read("openb_node_list_gpu_node.csv.gz"), &pods).expect("a trace");
        for policy in list(1, "fgd,divvy") {
            let policy: Policy = policy.parse().expect("a policy");
            let seeds = list(3, "42,43,44,45,46");
            if arguments.len() > 4 {
                for load in list(4, "") {
                    let load = load.parse().expect("a load in percent");
                    for seed in &seeds {
                        let setting = Completions::at(load, seed.parse().expect("a seed"));
                        let started = Instant::now();
                        let run = turn_over(&trace, &Order::ranks_by_name(&trace), policy, &setting);
                        let (used, lost, large) = (run.used_percent(), run.lost_percent(), run.large_lost_percent());
                        let seconds = started.elapsed().as_secs_f64();
                        println!(
                            "{name:<12} {:<15} load {load} seed {seed}: used {used:.2}, lost {lost:.2} (8 GPUs: {large:.2}), {seconds:.1} s",
                            policy.name()
                        );
                    }
                }
                continue;
            }
            let mut sums = [0.0; 3];
            let started = Instant::now();
            for seed in &seeds {
                let order = Order::read(&read(&format!("orders/{name}_{seed}.txt.gz")), &trace).expect("an order");
                let run = inflate(&trace, &order, policy);
                for (sum, percent) in sums.iter_mut().zip([95, 100, 130]) {
                    *sum += run.at(percent).expect("that much arrives");
                }
            }
            let count = seeds.len() as f64;
            let [at95, at100, at130] = sums.map(|sum| sum / count);
            let seconds = started.elapsed().as_secs_f64() / count;
            println!(
                "{name:<12} {:<15} {at95:>7.3} {at100:>7.3} {at130:>7.3} {seconds:>9.3}",
                policy.name()
            );
        }
    }
}
