//! Random histories with the real programs. Agents, probes, and the extender run as child processes, which are killed and cut off
//! at random. The API server refuses requests, loses answers, and stops. GPUs and kubelets fail, and nodes reboot.
//!
//! [`run`] draws a sequence from its seed, and plays it. In the end, [`audit`] checks that no invariant was violated at any
//! time. It uses only ground truth: the API server's commits, and the containers that ran. [`quiet`] reports what is still wrong
//! after all faults have ended.
//!
//! `DIVVY_CHAOS_SEED=7` plays one sequence again, and `DIVVY_CHAOS_RUNS=200` plays more sequences. A failed sequence prints its
//! seed, its machines, and its steps, and leaves the programs' logs below cargo's `tmp` directory.

mod audit;
mod plan;
mod quiet;
mod run;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;

/// The number of sequences in CI.
const RUNS: u64 = 20;
/// The number of concurrent sequences. Two cores can run about this many clusters.
const AT_ONCE: u64 = 4;

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text:?} is not a number")))
}

/// Once the cluster is quiet, every pod that fits runs.
#[test]
fn invariants_hold_whatever_crashes_repeats_or_comes_late() {
    let only = number("DIVVY_CHAOS_SEED");
    let seeds: VecDeque<u64> = match only {
        Some(seed) => (seed..seed + number("DIVVY_CHAOS_RUNS").unwrap_or(1)).collect(),
        None => (1..=number("DIVVY_CHAOS_RUNS").unwrap_or(RUNS)).collect(),
    };
    let runs = seeds.len();
    let seeds = Mutex::new(seeds);
    let outcomes = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..number("DIVVY_CHAOS_AT_ONCE").unwrap_or(AT_ONCE) {
            scope.spawn(|| {
                loop {
                    let Some(seed) = seeds.lock().expect("no thread panics holding it").pop_front() else {
                        return;
                    };
                    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
                    let outcome = runtime.expect("a runtime").block_on(run::sequence(seed));
                    outcomes.lock().expect("no thread panics holding it").push(outcome);
                }
            });
        }
    });
    let mut total: BTreeMap<&'static str, u64> = BTreeMap::new();
    let mut failures = Vec::new();
    for outcome in outcomes.into_inner().expect("no thread panics holding it") {
        match outcome {
            Ok(counts) => counts
                .into_iter()
                .for_each(|(what, count)| *total.entry(what).or_default() += count),
            Err(report) => failures.push(format!("{report:#}")),
        }
    }
    let failed = failures.len();
    assert!(
        failures.is_empty(),
        "{failed} of {runs} sequences failed\n\n{}",
        failures.join("\n\n")
    );
    if only.is_none() {
        // An event that never happened was not tested.
        let never: Vec<&&str> = run::SOMETIMES.iter().filter(|what| !total.contains_key(**what)).collect();
        assert!(
            never.is_empty(),
            "never happened in {runs} sequences: {never:?}; happened: {total:?}"
        );
    }
}
