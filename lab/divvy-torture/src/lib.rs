//! Random histories against the real decisions of the extender and the agent (`divvy_extender::core`, `divvy_agent_core`), in one
//! process. Every delay, loss, and crash in the simulated world is a separate step. After each step, the invariants are checked
//! by means of the simulation's own sums. At the end, everything in progress is completed, and all pods end.
//!
//! The simulation consists of the API server with its watches, lists, and Lease (`api`), kube-scheduler and controllers
//! (`world::scheduler`), proxies (`proxy`), the kubelet's device manager (`kubelet`), and nodes with their GPUs, cgroups, and
//! disks (`node`). Everything that real programs write and read again is converted to text and back.
//!
//! `cargo xtask torture` plays new histories for some minutes. The tests play the same 2,000 histories each time.
#![allow(clippy::unwrap_used, reason = "a panic of the world fails its history like anything else")]

pub mod agent;
pub mod api;
pub mod chance;
pub mod extender;
pub mod hostile;
pub mod kubelet;
pub mod node;
pub mod ops;
pub mod proxy;
pub mod quiet;
pub mod story;
pub mod whole;
pub mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use divvy_extender::core::NotSynced;
use ops::OpHistory;
use world::World;

/// The violation of an invariant, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Violation(pub String);

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<String> for Violation {
    fn from(text: String) -> Violation {
        Violation(text)
    }
}

impl From<&str> for Violation {
    fn from(text: &str) -> Violation {
        Violation(text.to_owned())
    }
}

impl From<NotSynced> for Violation {
    fn from(error: NotSynced) -> Violation {
        Violation(error.to_string())
    }
}

/// The violation of an invariant, and the events that led to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokenInvariant {
    pub what: Violation,
    /// The story of the history. It is empty if it was not requested.
    pub story: Vec<String>,
}

impl std::fmt::Display for BrokenInvariant {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}\n", self.what)?;
        self.story.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// Play a history, and return its story if `told`. A panic of a core counts as a failure.
pub fn play(history: &OpHistory, told: bool) -> Result<Vec<String>, BrokenInvariant> {
    let broken = |what: Violation, story: &[String]| BrokenInvariant {
        what,
        story: story.to_vec(),
    };
    let mut world = World::new(history.mix, told).map_err(|what| broken(what, &[]))?;
    let played = catch_unwind(AssertUnwindSafe(|| {
        for op in &history.steps {
            world.step(*op)?;
        }
        world.quiet()
    }));
    let result = match played {
        Ok(result) => result,
        Err(panic) => Err(match (panic.downcast_ref::<String>(), panic.downcast_ref::<&str>()) {
            (Some(text), _) => Violation(text.clone()),
            (None, Some(text)) => Violation::from(*text),
            (None, None) => Violation::from("a panic without a message"),
        }),
    };
    match result {
        Ok(()) => Ok(world.story.lines().to_vec()),
        Err(what) => Err(broken(what, world.story.lines())),
    }
}

/// Return the first words of a violation's text, skipping words with a digit. They identify the broken invariant independently of
/// the history.
fn kind(what: &str) -> Vec<&str> {
    let words = what
        .split_whitespace()
        .filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
    words.take(6).collect()
}

/// Return the shortest history that still breaks the same invariant. Steps are removed in blocks: at first blocks of half the
/// steps, then ever smaller ones, and in the end single steps, until no step can be removed.
pub fn shrink(history: &OpHistory) -> OpHistory {
    let breaks = |history: &OpHistory| play(history, false).err().map(|broken| broken.what.0);
    let Some(what) = breaks(history) else {
        return history.clone();
    };
    let mut least = history.clone();
    let mut size = least.steps.len().div_ceil(2);
    while size > 0 {
        let mut at = 0;
        let mut shorter = false;
        while at < least.steps.len() {
            let mut steps = least.steps.clone();
            steps.drain(at..(at + size).min(steps.len()));
            let fewer = OpHistory { mix: least.mix, steps };
            if breaks(&fewer).is_some_and(|other| kind(&other) == kind(&what)) {
                least = fewer;
                shorter = true;
            } else {
                at += size;
            }
        }
        size = match (size, shorter) {
            (1, true) => 1,
            (size, _) => size / 2,
        };
    }
    least
}

/// Play a history. If it breaks an invariant, shorten it, play the shortened history, and return its story and its steps.
pub fn failure_of(history: &OpHistory) -> Option<String> {
    if play(history, false).is_ok() {
        return None;
    }
    let least = shrink(history);
    let broken = play(&least, true).err();
    let told = broken.map_or_else(
        || "it failed once, but not when played again".to_owned(),
        |broken| broken.to_string(),
    );
    let steps: String = least.steps.iter().map(|step| format!("    Op::{step:?},\n")).collect();
    Some(format!("{told}\nThe steps, in a world of Mix::{:?}:\n{steps}", least.mix))
}
