//! Random histories against the real decisions of extender and agent (`divvy_extender::core`, `divvy_agent_core`), in one process: a world
//! whose every delay, loss and crash is a step of its own. After each step the invariants are checked, by sums of the simulation's
//! own; then the world is brought to rest.
//!
//! Simulated are the API server with its watches, lists and Lease (`api`), kube-scheduler and controllers (`scheduler`), proxies (`proxy`), the
//! kubelet's device manager (`kubelet`), and a node with its GPUs, cgroups and disk (`node`). What is written and read again goes through its text.
//!
//! `cargo xtask torture` plays fresh histories for some minutes; the tests play the same 2,000 each time.
#![allow(clippy::unwrap_used, reason = "a panic of the world fails its history like anything else")]

pub mod agent;
pub mod api;
pub mod chance;
pub mod extender;
pub mod kubelet;
pub mod node;
pub mod ops;
pub mod proxy;
pub mod quiet;
pub mod scheduler;
pub mod story;
pub mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use ops::History;
use world::World;

/// What broke, and what happened until then.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Broken {
    pub what: String,
    /// Empty if it was not to be told.
    pub story: Vec<String>,
}

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}\n", self.what)?;
        self.story.iter().try_for_each(|line| writeln!(f, "{line}"))
    }
}

/// Plays a history; gives its story if that is to be told. A panic of a core is a failure like any other.
pub fn play(history: &History, told: bool) -> Result<Vec<String>, Broken> {
    let broken = |what: String, story: &[String]| Broken {
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
            (Some(text), _) => text.clone(),
            (None, Some(text)) => (*text).to_owned(),
            (None, None) => "a panic without words".to_owned(),
        }),
    };
    match result {
        Ok(()) => Ok(world.story.lines().to_vec()),
        Err(what) => Err(broken(what, world.story.lines())),
    }
}

/// What broke, without what depends on the history: its first words that have no digit in them.
fn kind(what: &str) -> Vec<&str> {
    let words = what
        .split_whitespace()
        .filter(|word| !word.contains(|c: char| c.is_ascii_digit()));
    words.take(6).collect()
}

/// The shortest history that still breaks the same, by leaving steps out: halves first, single steps last, until none can be left out.
pub fn shrink(history: &History) -> History {
    let breaks = |history: &History| play(history, false).err().map(|broken| broken.what);
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
            let fewer = History { mix: least.mix, steps };
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

/// Plays a history, and on failure its shortest form again, to tell the story and the steps.
pub fn holds(history: &History) -> Result<(), String> {
    if play(history, false).is_ok() {
        return Ok(());
    }
    let least = shrink(history);
    let broken = play(&least, true).err();
    let told = broken.map_or_else(|| "it broke once and not again".to_owned(), |broken| broken.to_string());
    let steps: String = least.steps.iter().map(|step| format!("    Op::{step:?},\n")).collect();
    Err(format!("{told}\nThe steps, in a world of Mix::{:?}:\n{steps}", least.mix))
}
