//! Give broken files to all parsers of input from outside, for a limited time: `cargo run -p divvy-fuzz -- 60`; see also `--help`.
//!
//! The inputs are seeds with random changes (bytes, cuts, doubled pieces, words of the formats, places in JSON). Changed inputs that are still
//! accepted are changed further. This needs only this program, but does not measure coverage. With `--guided`, libFuzzer chooses the inputs
//! by the code that they reach. An input that breaks a rule is written to a file, and the exit status is 1.

#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::exit,
    reason = "a program for a terminal"
)]

mod arguments;
mod found;
mod guide;
mod trial;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use clap::Parser as _;

use arguments::{EndConditions, FuzzArguments};
use divvy_fuzz::targets::{FuzzTarget, documented, targets};
use found::{keep, report};
use trial::{FailedInput, Tally, TargetState};

/// The interval between checks of the end conditions.
const PULSE: Duration = Duration::from_millis(100);

fn main() {
    let arguments = FuzzArguments::parse();
    std::process::exit(match run(&arguments) {
        Ok(true) => 0,
        Ok(false) => 1,
        Err(why) => {
            eprintln!("error: {why:#}; see --help");
            2
        }
    });
}

/// Run the program. If a rule was broken, print it and return false. An error is about the command line.
fn run(arguments: &FuzzArguments) -> anyhow::Result<bool> {
    if arguments.list {
        targets().iter().for_each(|target| println!("{}", target.name));
        return Ok(true);
    }
    let all = targets();
    let mut sound = true;
    let mut complain = |line: &str| {
        eprintln!("{line}");
        sound = false;
    };
    if let (true, Err(why)) = (arguments.only.is_empty(), documented(&all)) {
        complain(&why.to_string());
    }
    let chosen = chosen(all, &arguments.only)?;
    if let Some(file) = &arguments.replay {
        return replay(&chosen, file);
    }
    // A panic is a finding, which is printed with its input.
    std::panic::set_hook(Box::new(|_| {}));
    let (sound_seeds, broken): (Vec<_>, Vec<_>) = chosen.into_iter().partition(|target| match target.check_seeds() {
        Ok(()) => true,
        Err(why) => {
            complain(&why.to_string());
            false
        }
    });
    drop(broken);
    let (ends, seed) = (arguments.ends(), arguments.seed());
    println!("seed {seed}");
    match &arguments.guided {
        Some(program) => guide::fuzz(&sound_seeds, ends, seed, program, arguments.corpus.as_deref(), &mut complain)?,
        None => fuzz(sound_seeds, ends, seed, &mut complain),
    }
    Ok(sound)
}

fn chosen(targets: Vec<FuzzTarget>, only: &[String]) -> anyhow::Result<Vec<FuzzTarget>> {
    let is = |target: &FuzzTarget, name: &String| target.name.contains(name);
    match only.iter().find(|name| !targets.iter().any(|target| is(target, name))) {
        Some(name) => bail!("there is no target {name:?}; --list prints their names"),
        None => Ok(targets
            .into_iter()
            .filter(|target| only.is_empty() || only.iter().any(|name| is(target, name)))
            .collect()),
    }
}

/// Let one target read one input.
fn replay(targets: &[FuzzTarget], file: &Path) -> anyhow::Result<bool> {
    let [target] = targets else {
        let names: Vec<&str> = targets.iter().map(|target| target.name).collect();
        bail!("--replay needs one target, and --only names {}", names.join(", "));
    };
    let input = std::fs::read(file).with_context(|| format!("could not read {}", file.display()))?;
    match target.run(&input) {
        Ok(cost) => {
            println!(
                "{}: {} bytes are {}; {} ms of processor time, {} KiB at once",
                target.name,
                input.len(),
                if cost.accepted { "accepted" } else { "refused" },
                cost.time.as_millis(),
                cost.bytes >> 10
            );
            Ok(true)
        }
        Err(why) => {
            eprintln!("{}: {} breaks a rule: {why}", target.name, file.display());
            Ok(false)
        }
    }
}

/// A running target.
struct RunningTarget {
    name: &'static str,
    thread: JoinHandle<Result<Tally, FailedInput>>,
    seen: Arc<TargetState>,
}

impl RunningTarget {
    fn start(target: FuzzTarget, ends: EndConditions, seed: u64, over: &Arc<AtomicBool>) -> RunningTarget {
        let (name, seen) = (target.name, Arc::new(TargetState::default()));
        let (over, shown) = (Arc::clone(over), Arc::clone(&seen));
        // A stack overflow ends the whole program and prints the thread's name.
        let named = thread::Builder::new().name(name.to_owned());
        let thread = named.spawn(move || trial::run(&target, ends, seed, &over, &shown));
        let thread = thread.unwrap_or_else(|error| panic!("could not start a thread: {error}"));
        RunningTarget { name, thread, seen }
    }
}

/// Run all targets at once, with inputs of this program's own generator.
fn fuzz(targets: Vec<FuzzTarget>, ends: EndConditions, seed: u64, complain: &mut impl FnMut(&str)) {
    let (began, over) = (Instant::now(), Arc::new(AtomicBool::new(false)));
    let mut running: Vec<RunningTarget> = targets
        .into_iter()
        .map(|target| RunningTarget::start(target, ends, seed, &over))
        .collect();
    let mut tallies: Vec<(&str, Tally)> = Vec::new();
    while !running.is_empty() {
        thread::sleep(PULSE);
        if ends.are_reached(began) {
            over.store(true, Ordering::Relaxed);
        }
        for ended in running.extract_if(.., |one| one.thread.is_finished()) {
            match ended.thread.join() {
                Ok(Ok(tally)) => tallies.push((ended.name, tally)),
                Ok(Err(FailedInput { input, why })) => {
                    complain(&report(ended.name, seed, &keep(ended.name, &input), &why.to_string()));
                }
                Err(_) => complain(&format!("{}: it ended too early", ended.name)),
            }
        }
        let endless = running.iter().find_map(|one| Some((one.name, one.seen.endless()?)));
        if let Some((name, input)) = endless {
            // A thread cannot be stopped from outside.
            complain(&report(name, seed, &keep(name, &input), "it does not end"));
            return;
        }
    }
    for (name, tally) in &tallies {
        println!(
            "{name}: {} inputs accepted, {} refused, in {:.1} s; at most {} ms and {} KiB for one",
            tally.accepted,
            tally.refused,
            tally.time.as_secs_f64(),
            tally.slowest.as_millis(),
            tally.largest >> 10
        );
    }
    let least = tallies.iter().map(|(_, tally)| tally.time).min().unwrap_or_default();
    let most = tallies.iter().map(|(_, tally)| tally.time).max().unwrap_or_default();
    let inputs: u64 = tallies.iter().map(|(_, tally)| tally.accepted + tally.refused).sum();
    println!(
        "{} targets kept their rules, each in {:.1} to {:.1} s of processor time; {inputs} inputs, seed {seed}, {} s",
        tallies.len(),
        least.as_secs_f64(),
        most.as_secs_f64(),
        began.elapsed().as_secs()
    );
}
