//! Throws broken files at everything that reads what others wrote, for a while: `cargo run -p divvy-testbed --example fuzz -- 60 [SEED]`.
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

mod chance;
mod cluster;
mod container;
mod host;
mod node;
mod programs;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use chance::Chance;

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

/// Of the processor's time that one input may take, in a debug build: a hundred times what the good ones do. What takes longer grows faster than
/// its input.
const LONGEST: Duration = Duration::from_secs(3);

/// What this thread has had of the processor: other targets have it, too.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or(0))
}

fn text(bytes: &[u8]) -> Option<&str> {
    std::str::from_utf8(bytes).ok()
}

fn main() {
    let mut words = std::env::args().skip(1);
    let number = |word: Option<String>, default: u64| word.map_or(Ok(default), |word| word.parse());
    let (Ok(seconds), Ok(seed)) = (number(words.next(), 10), number(words.next(), 1)) else {
        eprintln!("fuzz [SECONDS [SEED]]: for how long (all targets at once), and where chance begins (1)");
        std::process::exit(2);
    };
    std::panic::set_hook(Box::new(|_| {}));
    let targets = node::targets().into_iter().chain(cluster::targets());
    let targets = targets
        .chain(container::targets())
        .chain(host::targets())
        .chain(programs::targets());
    let targets: Vec<_> = targets
        .map(|target| {
            // What runs out of stack ends the whole program, and says the thread's name.
            let named = thread::Builder::new().name(target.name.to_owned());
            let started = named.spawn(move || fuzz(target, Duration::from_secs(seconds), seed));
            started.unwrap_or_else(|error| panic!("no thread could be started: {error}"))
        })
        .collect();
    let mut broken = false;
    for target in targets {
        match target
            .join()
            .unwrap_or_else(|_| Err("a target ended before its time".to_owned()))
        {
            Ok(line) => println!("{line} (seed {seed}, {seconds} s)"),
            Err(line) => {
                eprintln!("{line}");
                broken = true;
            }
        }
    }
    std::process::exit(i32::from(broken));
}

/// What was found, as a line: all targets at once.
fn fuzz(target: Target, time: Duration, seed: u64) -> Result<String, String> {
    let Target { name, read, good } = target;
    let mut corpus = good;
    let try_it = |input: &[u8]| {
        let before = cpu_time();
        let outcome = catch_unwind(AssertUnwindSafe(|| read(input))).map_err(|cause| {
            let cause = cause
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| cause.downcast_ref().copied());
            cause.unwrap_or("a panic").to_owned()
        })?;
        let took = cpu_time().saturating_sub(before);
        match took > LONGEST {
            true => Err(format!("{} bytes took {} ms", input.len(), took.as_millis())),
            false => Ok(outcome),
        }
    };
    for (number, input) in corpus.iter().enumerate() {
        match try_it(input) {
            Ok(true) => {}
            Ok(false) => return Err(format!("{name}: good input {number} is refused")),
            Err(cause) => return Err(format!("{name}: good input {number} breaks a rule: {cause}")),
        }
    }
    let (mut chance, mut accepted, mut refused) = (Chance(seed.max(1)), 0_u64, 0_u64);
    let end = Instant::now() + time;
    while Instant::now() < end {
        let mut input = corpus[chance.below(corpus.len())].clone();
        for _ in 0..=chance.below(4) {
            chance.change(&mut input);
        }
        match try_it(&input) {
            Ok(false) => refused += 1,
            Ok(true) => {
                accepted += 1;
                if corpus.len() < 200 && input.len() < 1 << 16 {
                    corpus.push(input);
                }
            }
            Err(cause) => {
                let word = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
                let path = std::env::temp_dir().join(format!("divvy-fuzz-{}-{word}", std::process::id()));
                let kept = std::fs::write(&path, &input);
                return Err(format!("{name}: {} breaks a rule ({kept:?}): {cause}", path.display()));
            }
        }
    }
    Ok(format!("{name}: {accepted} inputs read, {refused} refused, no rule broken"))
}
