//! Shows what happens when pods begin to end in a cluster that only filled up before, and when they stop ending again:
//!
//! `cargo run --release -p divvy-simulator --example policy_change -- NODES.csv[.gz] PODS.csv[.gz] [SEED …]`
//!
//! First, pods arrive all at once until they have requested the cluster's whole GPU capacity. Then pods arrive and end, at a load
//! of 0.97. Finally, pods arrive all at once again until they have requested 30 % of the capacity. `divvy` detects whether pods
//! end; it is compared with runs in which this is set from the start.

#![allow(clippy::print_stdout)]

use std::fs;

use divvy_policy::Policy;
use divvy_simulator::{Completions, Order, Setting, Trace, turn_over};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [nodes, pods, seeds @ ..] = &arguments[..] else {
        panic!("the arguments must be a list of nodes and a list of pods");
    };
    let read = |name: &String| fs::read(name).unwrap_or_else(|error| panic!("{name}: {error}"));
    let trace = Trace::read(&read(nodes), &read(pods)).unwrap_or_else(|error| panic!("{error}"));
    let ranks = Order::ranks_by_name(&trace);
    let all = trace.capacity_milli() as f64 / 100.0;
    println!("policy            seed  filled %  then in use %  lost %  after the flood %");
    for seed in seeds.iter().map(|seed| seed.parse().expect("a seed")) {
        let divvy = Setting::from(Policy::Divvy);
        for (name, setting) in [
            ("best-fit", Setting::from(Policy::BestFit)),
            ("fgd", Setting::from(Policy::Fgd)),
            ("divvy", divvy),
            (
                "divvy, pods end",
                Setting {
                    pods_end: Some(true),
                    ..divvy
                },
            ),
            (
                "divvy, none ends",
                Setting {
                    pods_end: Some(false),
                    ..divvy
                },
            ),
        ] {
            let completions = Completions {
                fill_percent: 100,
                warm_up: 0,
                counted: 30_000,
                flood_percent: 30,
                ..Completions::at(97, seed)
            };
            let run = turn_over(&trace, &ranks, setting, &completions).unwrap_or_else(|error| panic!("{error}"));
            println!(
                "{name:<16}  {seed:>4}  {:>8.2}  {:>13.2}  {:>6.2}  {:>17.2}",
                run.filled_milli as f64 / all,
                run.used_percent(),
                run.lost_percent(),
                run.flooded_milli as f64 / all,
            );
        }
    }
}
