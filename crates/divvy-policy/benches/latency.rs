//! Prints percentiles of the time for one decision, for three sizes of clusters. The time includes learning about the pod and
//! about its placement. Also prints the time for the first decision of a process that has just read such a cluster.
//!
//! `cargo bench -p divvy-policy --bench latency -- [POLICY [DECISIONS [NODES]]]`

#![allow(clippy::print_stdout)]

mod cluster;

use cluster::Cluster;
use divvy_policy::Policy;
use rustix::time::{ClockId, clock_gettime};

/// Return the processor time of this thread in microseconds. Other work on the machine does not count.
fn now() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e6 + time.tv_nsec as f64 / 1e3
}

fn main() {
    // cargo bench adds --bench.
    let mut arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
    let policy: Policy = arguments.next().as_deref().unwrap_or("divvy").parse().expect("a policy");
    let decisions: usize = arguments.next().map_or(20_000, |count| count.parse().expect("a number"));
    let only: Option<usize> = arguments.next().map(|nodes| nodes.parse().expect("a number of nodes"));
    println!(
        "{:>6} {:>9} {:>9} {:>9} {:>9} {:>9} {:>9}  (microseconds)",
        "nodes", "mean", "p50", "p99", "p99.9", "most", "first"
    );
    for (nodes, only_large) in [(1213, false), (5000, true), (20_000, true)] {
        if only.is_some_and(|only| only != nodes) {
            continue;
        }
        let mut cluster = Cluster::new(policy, nodes, only_large);
        cluster.fill();
        let mut micros: Vec<f64> = (0..decisions)
            .map(|_| {
                cluster.end();
                let demand = cluster.pod();
                let started = now();
                cluster.arrive(&demand);
                now() - started
            })
            .collect();
        micros.sort_by(f64::total_cmp);
        let at = |part: f64| micros[((micros.len() - 1) as f64 * part) as usize];
        let mean = micros.iter().sum::<f64>() / micros.len() as f64;
        let mut cold = cluster.cold(policy);
        let demand = cluster.pod();
        let started = now();
        cold.decide(&demand, 0);
        let first = now() - started;
        println!(
            "{nodes:>6} {mean:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {first:>9.1}",
            at(0.5),
            at(0.99),
            at(0.999),
            at(1.0)
        );
    }
}
