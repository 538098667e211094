//! The same 2,000 histories on each run. `cargo xtask torture` plays other histories.

use divvy_torture::ops::OpHistory;
use divvy_torture::{failure_of, hostile, play};

fn hold(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        if let Some(told) = failure_of(&OpHistory::of(seed)) {
            panic!("history {seed}: {told}");
        }
    }
}

#[test]
fn whatever_happens_in_whatever_order_the_invariants_hold() {
    hold(0..1_000);
}

#[test]
fn and_in_a_thousand_other_orders_too() {
    hold(1_000..2_000);
}

#[test]
fn a_hostile_pod_changes_no_report_about_others() {
    for seed in 0..2_000 {
        if let Err(broken) = hostile::play(seed) {
            panic!("history {seed}: {broken}");
        }
    }
}

#[test]
fn the_same_steps_lead_to_the_same_decisions() {
    for seed in 0..50 {
        let history = OpHistory::of(seed);
        assert_eq!(play(&history, true), play(&history, true), "history {seed}");
    }
}

/// Histories in which nothing happens would prove nothing.
#[test]
fn the_stories_have_in_them_what_they_are_about() {
    let mut told = String::new();
    for seed in 0..1_000 {
        told.push_str(&play(&OpHistory::of(seed), true).expect("it holds").join("\n"));
    }
    for what in [
        "runs on",
        "refused (memory-held)",
        "refused (gpu-unavailable)",
        "refused (double-handout)",
        "forgets them (B1)",
        "the agent lists the pods",
        "the agent's list of pods arrives, overtaken by the watch",
        "the agent's list of pods arrives, newer than",
        "gets no answer",
        "the list of pods arrives at the extender",
        "is killed",
        "is evicted",
        "carried out late",
        ": Conflict",
        ": NotFound",
        "is answered: Ok",
        "is answered: Err",
        "a proxy answers: 404",
        "a proxy answers: 502",
        "a proxy answers: 201",
        "no healthy devices",
        "no longer healthy",
        "HeldWithoutPod",
        "GrantEnded",
        "SpecRebuilt",
        "RecordRebuilt",
        "Overcommitted",
        "preempts",
        "is created in place of",
        "replica-1 leads",
        "replica-2 leads",
        "is frozen",
        "no Binding of",
        "checks the lease: AnswerLost",
        "gives the lease back",
        "the wall clock of",
        "another card is put in place",
        "with spec.nodeName",
        "whole GPU(s)",
        "of this node's GPUs are healthy and not in use",
    ] {
        assert!(
            told.contains(what),
            "{what:?} is in none of the {} lines",
            told.lines().count()
        );
    }
}
