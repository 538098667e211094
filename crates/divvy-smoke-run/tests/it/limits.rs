//! The limits of a run hold, and it leaves nothing behind.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use divvy_smoke_run::Mark;

use crate::world::{LIMITS, World, planned, planned_with, wrong};

/// A thousand nodes take few calls.
#[test]
fn nodes_are_tried_eight_pods_at_a_time() {
    let planned = planned(8000);
    let world = World {
        unscheduled: (0..8000).step_by(1000).collect(),
        ..World::default()
    };
    let history = world.play(&planned, LIMITS);
    let words = history.words();
    assert_eq!(words.len(), 8000);
    assert_eq!(words.iter().filter(|word| **word == "ERROR").count(), 8);
    assert_eq!(words.iter().filter(|word| **word == "PASS").count(), 7992);
    assert_eq!((history.most_pods, history.left.len()), (8, 0));
    assert!(history.calls_in_a_second() <= LIMITS.calls, "{}", history.calls_in_a_second());
    // Two calls for each pod, and one reading of the cluster for each pod that waits alone.
    assert_eq!(history.calls.len(), 2 * 8000 + 8 * LIMITS.calls_to_explain);
}

#[test]
fn with_many_pods_at_a_time_the_calls_are_the_limit() {
    let planned = planned(800);
    let limits = divvy_smoke_run::RunLimits { parallel: 800, ..LIMITS };
    let history = World::default().play(&planned, limits);
    assert_eq!(history.calls_in_a_second(), LIMITS.calls);
    let at_least = (2 * 800 / LIMITS.calls as u64 - 1) * 1000;
    assert!(
        (at_least..at_least + 10_000).contains(&history.ended_at),
        "{}",
        history.ended_at
    );
}

#[test]
fn pods_that_wait_together_are_explained_together() {
    let world = World {
        unscheduled: (0..8).collect(),
        ..World::default()
    };
    let history = world.play(&planned(8), LIMITS);
    assert_eq!(history.calls.len(), 8 + LIMITS.calls_to_explain + 8);
}

fn some() -> impl Strategy<Value = BTreeSet<usize>> {
    proptest::collection::btree_set(0..40usize, 0..12)
}

proptest! {
    #[test]
    fn every_run_ends_and_leaves_only_the_undeletable(
        refused in some(), unclear in some(), unscheduled in some(), endless in some(), undeletable in some(),
        stop_at in proptest::option::of(0..40_000u64), parallel in 1..12usize,
    ) {
        let world = World { refused, unclear, unscheduled, endless, undeletable, stop_at, ..World::default() };
        let limits = divvy_smoke_run::RunLimits { parallel, ..LIMITS };
        let history = world.play(&planned(40), limits);
        prop_assert_eq!(history.words().len(), 40);
        prop_assert!(history.left.is_subset(&world.undeletable), "{:?}", history.left);
        let told: BTreeSet<usize> = history.run.left().iter().map(|(number, _)| *number).collect();
        prop_assert_eq!(&told, &history.left);
        // What cannot be deleted does not count any more.
        prop_assert!(history.most_pods <= parallel + history.left.len());
        prop_assert!(history.calls_in_a_second() <= limits.calls);
        // A run that is stopped waits for no test: only for the limit on calls.
        if let Some(stop_at) = world.stop_at {
            prop_assert!(history.ended_at <= stop_at + 3000, "stopped at {stop_at}, over at {}", history.ended_at);
        }
    }

    /// The test of a GPU never stays open, no matter what happens.
    #[test]
    fn only_a_passed_gpu_returns_to_service(
        out in some(), wrong_ones in some(), refused in some(), unclear in some(), unscheduled in some(), endless in some(), unmarkable in some(),
        stop_at in proptest::option::of(0..40_000u64),
    ) {
        let planned = planned_with(40, &out);
        let results: BTreeMap<_, _> = wrong_ones.iter().map(|number| (*number, wrong(&planned[*number].target.uuid))).collect();
        let world = World { refused, unclear, unscheduled, endless, unmarkable, stop_at, results, ..World::default() };
        let limits = divvy_smoke_run::RunLimits { report: true, ..LIMITS };
        let history = world.play(&planned, limits);
        prop_assert!(history.left.is_empty());
        prop_assert!(history.calls_in_a_second() <= limits.calls);
        for (number, tried) in history.run.results().enumerate() {
            let (word, is_out) = (tried.verdict.word(), out.contains(&number));
            match history.marks.get(&number) {
                Some(Mark::Testing) => prop_assert!(false, "GPU {number} stays open for tests"),
                Some(Mark::Passed) => prop_assert!(is_out && word == "PASS", "GPU {number}: {word}"),
                Some(Mark::Failed(_)) => prop_assert!(is_out || wrong_ones.contains(&number), "GPU {number}: {word}"),
                None => {
                    let is_told = world.unmarkable.contains(&number);
                    prop_assert!(is_told || word != "FAIL", "GPU {number} has no mark: {word}");
                }
            }
        }
    }
}
