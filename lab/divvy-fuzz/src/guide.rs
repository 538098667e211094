//! The targets under libFuzzer: `divvy-fuzz-guided`, one process per target.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use rustix::process::{Pid, Signal, kill_process};

use crate::PULSE;
use crate::arguments::Ends;
use crate::found::report;
use divvy_fuzz::targets::Target;

/// The processor time of one turn of a target. Targets take turns if all of them run until the same end.
const TURN: Duration = Duration::from_secs(5);
/// The greatest length of an input in bytes. An object may have 256 KiB of annotations, but long inputs are slow.
const LONGEST: usize = 64 << 10;
/// The wall-clock seconds after which libFuzzer reports that an input does not end. The limit is high because other programs may
/// use the processor in the meantime.
const ENDLESS_S: u64 = 300;

/// A target and its results so far.
struct Course<'a> {
    target: &'a Target,
    directory: PathBuf,
    time: Duration,
    inputs: u64,
    /// The number of code edges that were reached.
    edges: u64,
    broken: bool,
}

/// Run all targets in turn until each has had its time. An error is about the program or the directory.
pub(crate) fn fuzz(
    targets: &[Target],
    ends: Ends,
    seed: u64,
    program: &Path,
    corpus: Option<&Path>,
    complain: &mut impl FnMut(&str),
) -> anyhow::Result<()> {
    let began = Instant::now();
    let temporary = tempfile::tempdir().context("could not create a temporary directory")?;
    let directory = corpus.unwrap_or(temporary.path());
    let mut courses = Vec::new();
    for target in targets {
        courses.push(Course::new(target, directory).with_context(|| directory.display().to_string())?);
    }
    let places = thread::available_parallelism().map_or(1, usize::from);
    for round in 0.. {
        let mut waiting: Vec<&mut Course<'_>> = courses.iter_mut().filter(|course| course.wants(ends, began)).collect();
        if waiting.is_empty() {
            break;
        }
        waiting.reverse();
        let mut running: Vec<(&mut Course<'_>, Process)> = Vec::new();
        while !(waiting.is_empty() && running.is_empty()) {
            while running.len() < places
                && let Some(course) = waiting.pop()
            {
                if course.wants(ends, began) {
                    let process = Process::start(program, course, seed.wrapping_add(round))?;
                    running.push((course, process));
                }
            }
            thread::sleep(PULSE);
            for (course, process) in &mut running {
                process.end_in_time(course.turn(ends, began));
            }
            for (course, mut process) in running.extract_if(.., |(_, process)| process.has_ended()) {
                if let Err((input, why)) = process.result(course) {
                    course.broken = true;
                    complain(&report(course.target.name, seed, &input, &why));
                }
            }
        }
    }
    for course in &courses {
        println!(
            "{}: {} inputs, {} edges reached, in {:.1} s",
            course.target.name,
            course.inputs,
            course.edges,
            course.time.as_secs_f64()
        );
    }
    let kept = courses.iter().filter(|course| !course.broken);
    println!(
        "{} targets kept their rules under libFuzzer; {} inputs, {} edges, seed {seed}, {} s",
        kept.count(),
        courses.iter().map(|course| course.inputs).sum::<u64>(),
        courses.iter().map(|course| course.edges).sum::<u64>(),
        began.elapsed().as_secs()
    );
    Ok(())
}

impl<'a> Course<'a> {
    fn new(target: &'a Target, directory: &Path) -> std::io::Result<Course<'a>> {
        let directory = directory.join(target.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"));
        std::fs::create_dir_all(&directory)?;
        for (number, seed) in target.seeds().enumerate() {
            std::fs::write(directory.join(format!("seed-{number}")), seed)?;
        }
        Ok(Course {
            target,
            directory,
            time: Duration::ZERO,
            inputs: 0,
            edges: 0,
            broken: false,
        })
    }

    fn wants(&self, ends: Ends, began: Instant) -> bool {
        !self.broken && !self.turn(ends, began).is_zero()
    }

    /// Return the processor time that the target gets before the next one's turn.
    fn turn(&self, ends: Ends, began: Instant) -> Duration {
        match (ends.are_reached(began), ends.each) {
            (true, _) => Duration::ZERO,
            (false, Some(each)) => each.saturating_sub(self.time).min(TURN),
            (false, None) => TURN,
        }
    }
}

/// A running libFuzzer for one target.
struct Process {
    child: Child,
    /// The program's output.
    log: tempfile::NamedTempFile,
    /// The path prefix for an input that breaks a rule.
    found: String,
    asked_to_end: bool,
    time: Duration,
}

impl Process {
    fn start(program: &Path, course: &Course<'_>, seed: u64) -> anyhow::Result<Process> {
        let failed = || format!("could not start {}", program.display());
        let log = tempfile::NamedTempFile::new().with_context(failed)?;
        let words = |log: &File| log.try_clone().map(Stdio::from).with_context(failed);
        let found = std::env::temp_dir().join(format!(
            "divvy-fuzz-{}-{}-",
            course.target.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-"),
            std::process::id()
        ));
        let found = found.display().to_string();
        let child = Command::new(program)
            .env("DIVVY_FUZZ_TARGET", course.target.name)
            .arg(&course.directory)
            .arg(format!("-seed={}", seed % u64::from(u32::MAX)))
            .arg(format!("-max_len={LONGEST}"))
            // The full length is used from the start, because growth beyond the input's size shows with long inputs.
            .arg("-len_control=0")
            .arg(format!("-timeout={ENDLESS_S}"))
            .arg(format!("-artifact_prefix={found}"))
            .arg("-print_final_stats=1")
            .stdin(Stdio::null())
            .stdout(words(log.as_file())?)
            .stderr(words(log.as_file())?)
            .spawn()
            .with_context(failed)?;
        Ok(Process {
            child,
            log,
            found,
            asked_to_end: false,
            time: Duration::ZERO,
        })
    }

    /// Send SIGUSR1 after `turn`. libFuzzer then ends between two inputs and prints its results.
    fn end_in_time(&mut self, turn: Duration) {
        self.time = processor_time(self.child.id()).unwrap_or(self.time);
        if self.time >= turn && !self.asked_to_end {
            self.asked_to_end = true;
            let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
            // A process that has ended in the meantime needs no signal.
            let _ = pid.map(|pid| kill_process(pid, Signal::USR1));
        }
    }

    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    /// Add up the results. The error is the input that broke a rule, and the rule.
    fn result(&mut self, course: &mut Course<'_>) -> Result<(), (PathBuf, String)> {
        let log = std::fs::read(self.log.path()).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let number_after = |line: &str, word: &str| {
            let rest = line.split_once(word)?.1.trim_start();
            rest.split(|c: char| !c.is_ascii_digit()).next()?.parse::<u64>().ok()
        };
        course.time += self.time;
        course.inputs += log
            .lines()
            .filter_map(|line| number_after(line, "stat::number_of_executed_units:"))
            .sum::<u64>();
        let edges = log.lines().filter_map(|line| number_after(line, " cov: ")).max();
        course.edges = course.edges.max(edges.unwrap_or(0));
        if self.child.wait().is_ok_and(|status| status.success()) {
            return Ok(());
        }
        let is_found = |line: &str| Some(PathBuf::from(line.split_once("Test unit written to ")?.1));
        let input = log.lines().find_map(is_found).unwrap_or_else(|| PathBuf::from(&self.found));
        // The panic's message is in the line after the one with its location.
        let said = log.lines().skip_while(|line| !line.contains("panicked at")).nth(1);
        let why = said.or_else(|| log.lines().find(|line| line.contains("ERROR: libFuzzer")));
        let tail = log.lines().last().unwrap_or("it printed nothing");
        Err((input, why.unwrap_or(tail).to_owned()))
    }
}

/// Return the processor time of all threads from /proc/PID/stat: user and system time in hundredths of a second.
fn processor_time(pid: u32) -> Option<Duration> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The fields after the program's name, which may contain spaces.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut ticks = || fields.next()?.parse::<u64>().ok();
    Some(Duration::from_millis((ticks()? + ticks()?) * 10))
}
