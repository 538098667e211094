//! The cores in one process: the extender's and the agents' real decisions over a world whose every delay, loss and crash is a
//! step of its own. Each test plays a list of steps, checks the invariants of DESIGN.md section 7 after each, and then brings
//! the world to rest.
//!
//! Simulated, in `api`, `kubelet` and `node`: objects and watches, the device manager's books, cgroups, the disk. Everything that
//! decides is `divvy_extender::core` and `divvy_agent::decide`, and everything that is written and read again goes through its
//! text form. `PROPTEST_CASES` sets the number of stories of each test.

mod agent;
mod api;
mod chance;
mod extender;
mod kubelet;
mod named;
mod node;
mod ops;
mod quiet;
mod story;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{TestCaseError, TestRunner};

use ops::{Mix, Op, op};
use world::World;

/// Plays the steps; the error is what broke, with the story when it was told. A panic of a core is a failure like any other.
fn play(ops: &[Op], told: bool) -> Result<Vec<String>, String> {
    let mut world = World::new(told)?;
    let played = catch_unwind(AssertUnwindSafe(|| {
        for op in ops {
            world.step(*op)?;
        }
        world.quiet()
    }));
    let result = match played {
        Ok(result) => result,
        Err(panic) => Err(match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
            (Some(text), _) => text.clone(),
            (None, Some(text)) => (*text).to_owned(),
            (None, None) => "a panic without words".to_owned(),
        }),
    };
    match result {
        Ok(()) => Ok(world.story.lines().to_vec()),
        Err(text) => Err(format!("{text}\n\n{}", world.story.lines().join("\n"))),
    }
}

/// Plays the steps, and on failure again, to tell the story.
fn holds(ops: &[Op]) -> Result<(), String> {
    match play(ops, false) {
        Ok(_) => Ok(()),
        Err(short) => Err(play(ops, true).err().unwrap_or(short)),
    }
}

/// So many stories, or as many as `PROPTEST_CASES` says.
fn config(cases: u32) -> ProptestConfig {
    ProptestConfig {
        cases,
        max_shrink_iters: 20_000,
        // A failure becomes a test with a name, in `named`.
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

fn stories(mix: Mix) -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(op(mix), 1..60)
}

proptest! {
    #![proptest_config(config(1_000))]

    #[test]
    fn whatever_happens_in_whatever_order_the_invariants_hold(ops in stories(Mix::Everything)) {
        holds(&ops).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn whatever_becomes_of_calls_to_the_api_server_the_invariants_hold(ops in stories(Mix::Binds)) {
        holds(&ops).map_err(TestCaseError::fail)?;
    }
}

proptest! {
    #![proptest_config(config(50))]

    #[test]
    fn the_same_steps_lead_to_the_same_decisions(ops in stories(Mix::Everything)) {
        let once = play(&ops, true);
        prop_assert!(once.is_ok(), "{}", once.unwrap_err());
        prop_assert_eq!(once, play(&ops, true));
    }
}

/// Stories in which nothing happens would prove nothing.
#[test]
fn the_stories_have_in_them_what_they_are_about() {
    let mut runner = TestRunner::deterministic();
    let mut told = String::new();
    for mix in [Mix::Everything, Mix::Binds] {
        for _ in 0..40 {
            let ops = stories(mix).new_tree(&mut runner).expect("a story").current();
            told.push_str(&play(&ops, true).expect("it holds").join("\n"));
        }
    }
    for what in [
        "runs on",
        "refused (memory-held)",
        "refused (gpu-unavailable)",
        "refused (double-handout)",
        "forgets them (B1)",
        "the agent lists the pods again",
        "is killed",
        "is evicted",
        "carried out late",
        ": Conflict",
        ": NotFound",
        "is answered: Ok",
        "is answered: Err",
        "no healthy devices",
        "no longer healthy",
        "HeldWithoutPod",
        "GrantEnded",
        "SpecRebuilt",
        "RecordRebuilt",
        "Overcommitted",
    ] {
        assert!(
            told.contains(what),
            "in {} lines nothing like {what:?} happened",
            told.lines().count()
        );
    }
}
