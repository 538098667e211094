//! Throws broken files at everything that reads what others wrote, for a while: `cargo run -p divvy-testbed --example fuzz -- 60 [SEED]`, and `--help`.
//!
//! The inputs are good files that are changed by chance (bytes, cuts, doubled pieces, words of the formats), and changed files that were read all
//! the same are changed further. It needs no nightly compiler, as cargo-fuzz does, and sees no coverage; what a seed finds it finds again. An input
//! that breaks a rule is written to a file and named, and the exit status is 1.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::exit,
    reason = "a program for a terminal"
)]

mod arguments;
mod chance;
mod cluster;
mod commands;
mod container;
mod host;
mod node;
mod programs;
mod trial;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use arguments::{Arguments, HELP, Limits, Run};
use trial::{Seen, Tally};

type Read = Box<dyn Fn(&[u8]) -> bool + Send>;

/// Something that reads what others wrote.
struct Target {
    name: &'static str,
    /// Reads an input, and says whether it was good. Panics if a rule does not hold.
    read: Read,
    good: Vec<Vec<u8>>,
}

impl Target {
    fn new(name: &'static str, read: impl Fn(&[u8]) -> bool + Send + 'static, good: &[&str]) -> Target {
        Target {
            name,
            read: Box::new(read),
            good: good.iter().map(|text| text.as_bytes().to_vec()).collect(),
        }
    }
}

/// How often it is looked whether all is over.
const PULSE: Duration = Duration::from_millis(100);

/// What reads what: a table whose last column are the targets.
const TABLE: &str = include_str!("../../../../docs/fuzzing.md");

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

fn main() {
    let done = match Arguments::parse(std::env::args().skip(1)) {
        Ok(Arguments::Help) => {
            println!("{HELP}");
            Ok(true)
        }
        Ok(Arguments::List) => {
            targets().iter().for_each(|target| println!("{}", target.name));
            Ok(true)
        }
        Ok(Arguments::Run(run)) => chosen(targets(), run.only.as_deref()).map(|targets| fuzz(targets, &run)),
        Err(why) => Err(why),
    };
    std::process::exit(match done {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(why) => {
            eprintln!("error: {why}; see --help");
            2
        }
    });
}

fn targets() -> Vec<Target> {
    let targets = node::targets().into_iter().chain(cluster::targets());
    let targets = targets.chain(container::targets()).chain(host::targets());
    targets.chain(programs::targets()).chain(commands::targets()).collect()
}

fn chosen(targets: Vec<Target>, only: Option<&[String]>) -> Result<Vec<Target>, String> {
    let Some(only) = only else { return Ok(targets) };
    let is = |target: &Target, name: &String| target.name.contains(name);
    match only.iter().find(|name| !targets.iter().any(|target| is(target, name))) {
        Some(name) => Err(format!("there is no target {name:?}; --list names them")),
        None => Ok(targets
            .into_iter()
            .filter(|target| only.iter().any(|name| is(target, name)))
            .collect()),
    }
}

/// What the table says and what there is are the same.
fn documented(targets: &[Target]) -> Result<(), String> {
    let rows = TABLE.lines().filter(|line| line.starts_with('|')).skip(2);
    let cells = rows.filter_map(|row| row.trim_end_matches('|').rsplit('|').next());
    let said: BTreeSet<&str> = cells.flat_map(|cell| cell.split(';')).map(str::trim).collect();
    let there: BTreeSet<&str> = targets.iter().map(|target| target.name).collect();
    let differ: Vec<&&str> = said.symmetric_difference(&there).collect();
    match differ.is_empty() {
        true => Ok(()),
        false => Err(format!("docs/fuzzing.md and the targets differ: {differ:?}")),
    }
}

/// A target that runs.
struct Running {
    name: &'static str,
    thread: JoinHandle<Result<Tally, String>>,
    seen: Arc<Seen>,
}

impl Running {
    fn start(target: Target, limits: &Limits, seed: u64, over: &Arc<AtomicBool>) -> Running {
        let (name, seen) = (target.name, Arc::new(Seen::default()));
        let (limits, over, shown) = (limits.clone(), Arc::clone(over), Arc::clone(&seen));
        // What runs out of stack ends the whole program, and says the thread's name.
        let named = thread::Builder::new().name(name.to_owned());
        let thread = named.spawn(move || trial::run(target, &limits, seed, &over, &shown));
        let thread = thread.unwrap_or_else(|error| panic!("no thread could be started: {error}"));
        Running { name, thread, seen }
    }
}

/// Whether no rule was broken, which is told.
fn fuzz(targets: Vec<Target>, run: &Run) -> bool {
    let Run { limits, seed, only } = run;
    let mut sound = true;
    let mut complain = |line: &str| {
        eprintln!("{line}");
        sound = false;
    };
    if let (None, Err(why)) = (only, documented(&targets)) {
        complain(&why);
    }
    std::panic::set_hook(Box::new(|_| {}));
    let (began, over) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let mut running: Vec<Running> = targets
        .into_iter()
        .map(|target| Running::start(target, limits, *seed, &over))
        .collect();
    let mut tallies: Vec<(&str, Tally)> = Vec::new();
    while !running.is_empty() {
        thread::sleep(PULSE);
        let wall = limits.wall.is_some_and(|wall| began.elapsed() >= wall);
        if wall || limits.until.as_ref().is_some_and(|file| file.exists()) {
            over.store(true, Ordering::Relaxed);
        }
        for ended in running.extract_if(.., |one| one.thread.is_finished()) {
            match ended.thread.join() {
                Ok(Ok(tally)) => tallies.push((ended.name, tally)),
                Ok(Err(line)) => complain(&line),
                Err(_) => complain(&format!("{}: it ended before its time", ended.name)),
            }
        }
        let endless = running.iter().find_map(|one| Some((one.name, one.seen.endless()?)));
        if let Some((name, input)) = endless {
            // A thread cannot be stopped from without.
            complain(&format!("{name}: {} does not end", trial::keep(name, &input).display()));
            return false;
        }
    }
    for (name, Tally { read, refused, time }) in &tallies {
        println!(
            "{name}: {read} inputs read, {refused} refused, in {:.1} s",
            time.as_secs_f64()
        );
    }
    let least = tallies.iter().map(|(_, tally)| tally.time).min().unwrap_or_default();
    let most = tallies.iter().map(|(_, tally)| tally.time).max().unwrap_or_default();
    let inputs: u64 = tallies.iter().map(|(_, tally)| tally.read + tally.refused).sum();
    println!(
        "{} targets kept their rules, each in {:.1} to {:.1} s of the processor's time; {inputs} inputs, seed {seed}, {} s",
        tallies.len(),
        least.as_secs_f64(),
        most.as_secs_f64(),
        began.elapsed().as_secs()
    );
    sound
}
