//! The long run: `cargo xtask torture`.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a program for a terminal")]

use std::hash::{BuildHasher, RandomState};
use std::io::{IsTerminal, Write};
use std::num::NonZeroUsize;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Parser;
use divvy_torture::ops::OpHistory;
use divvy_torture::{failure_of, hostile, play};
use rustix::time::{ClockId, clock_gettime};

/// Play random histories against the decisions of the extender and of the agents, on all cores
///
/// Each history is a random sequence of up to 60 steps against the real decisions, in one process: pods are created and deleted, watches lag,
/// lists are overtaken, API calls are lost, proxies answer, processes are killed or frozen, GPUs are replaced. After each step the invariants
/// are checked. In each history, a hostile pod also changes the files of its share, beside pods of which the agent must say the same as without it.
/// A history is determined by its number, which plays it again.
///
/// The first history that breaks an invariant ends the run. It is shortened and printed as a story, with the command that plays it again.
/// Exit status: 0 if all histories held, 1 if one did not.
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask torture",
    after_help = "Examples:
  cargo xtask torture --minutes 60
  cargo xtask torture --minutes 0 --seed 7    plays history 7 only"
)]
struct TortureArguments {
    /// Minutes of processor time to play on each core; with 0, play one history
    #[arg(long, value_name = "N", default_value_t = 10)]
    minutes: u32,
    /// Number of the first history; the next ones follow it [default: a random number]
    #[arg(long, value_name = "S")]
    seed: Option<u64>,
}

fn main() -> ExitCode {
    let arguments = TortureArguments::parse();
    // A panic of a core is reported with its history.
    std::panic::set_hook(Box::new(|_| {}));
    let first = arguments
        .seed
        .unwrap_or_else(|| RandomState::new().hash_one(std::process::id()));
    match run(first, Duration::from_secs(u64::from(arguments.minutes) * 60)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(seed) => {
            let hostile = || hostile::play(seed).err().map(|broken| broken.to_string());
            let told = failure_of(&OpHistory::of(seed)).or_else(hostile);
            println!("{}", told.as_deref().unwrap_or("it failed once, but not when played again"));
            println!("History {seed} breaks an invariant. To play it again: cargo xtask torture --minutes 0 --seed {seed}");
            ExitCode::FAILURE
        }
    }
}

/// Play histories. An error is the number of a history that breaks an invariant.
fn run(first: u64, time: Duration) -> Result<(), u64> {
    let began = Instant::now();
    let cores = if time.is_zero() {
        1
    } else {
        std::thread::available_parallelism().map_or(1, NonZeroUsize::get)
    };
    println!("playing histories from number {first}, on {cores} core(s)");
    let (next, played) = (AtomicU64::new(0), AtomicU64::new(0));
    let broken: Mutex<Option<u64>> = Mutex::new(None);
    // Not the time that passes: other work on the machine must not make the search smaller.
    let most = time * u32::try_from(cores).unwrap_or(u32::MAX);
    let over = || processor_time() >= most || broken.lock().is_ok_and(|broken| broken.is_some());
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    let seed = first.wrapping_add(number);
                    if (play(&OpHistory::of(seed), false).is_err() || hostile::play(seed).is_err())
                        && let Ok(mut broken) = broken.lock()
                    {
                        // The lowest number wins, so that every run reports the same history, whichever core is first.
                        *broken = Some(broken.map_or(seed, |other| other.min(seed)));
                    }
                    played.fetch_add(1, Ordering::Relaxed);
                    if over() {
                        break;
                    }
                }
            });
        }
        let mut said = Instant::now();
        // A terminal shows one line that changes; a log gets one line per minute.
        let terminal = std::io::stderr().is_terminal();
        let pause = Duration::from_secs(if terminal { 1 } else { 60 });
        while !over() {
            std::thread::sleep(Duration::from_millis(100));
            if said.elapsed() >= pause {
                said = Instant::now();
                let line = progress(played.load(Ordering::Relaxed), began.elapsed(), cores);
                let end = if terminal { "\r" } else { "\n" };
                eprint!("{line}{end}");
                // A failure to show progress does not matter.
                let _ = std::io::stderr().flush();
            }
        }
    });
    let played = played.into_inner();
    println!("{}", progress(played, began.elapsed(), cores));
    match broken.into_inner().ok().flatten() {
        Some(seed) => Err(seed),
        None => Ok(()),
    }
}

/// Return the processor time of this process.
fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

fn progress(played: u64, time: Duration, cores: usize) -> String {
    let seconds = time.as_secs_f64().max(0.001);
    let rate = played as f64 / seconds;
    format!(
        "{played} histories in {seconds:.0} s: {rate:.0} a second, {:.0} on each core",
        rate / cores as f64
    )
}
