//! The targets under libFuzzer: `divvy-fuzz-guided`, one process per target, one after the other.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::Context as _;

use crate::arguments::EndConditions;
use crate::found::report;
use divvy_fuzz::targets::FuzzTarget;

/// The greatest length of an input in bytes. An object may have 256 KiB of annotations, but long inputs are slow.
const LONGEST: usize = 64 << 10;
/// The wall-clock seconds after which libFuzzer reports that an input does not end. The limit is high because other programs may
/// use the processor in the meantime.
const ENDLESS_S: u64 = 300;

/// Run each target until it has had its time. An error is about the program or the directory.
pub(crate) fn fuzz(
    targets: &[FuzzTarget],
    ends: EndConditions,
    seed: u64,
    program: &Path,
    corpus: Option<&Path>,
    complain: &mut impl FnMut(&str),
) -> anyhow::Result<()> {
    let began = Instant::now();
    let temporary = tempfile::tempdir().context("could not create a temporary directory")?;
    let directory = corpus.unwrap_or(temporary.path());
    let mut kept = 0;
    for (number, target) in targets.iter().enumerate() {
        let time = ends.time_of_next(began, targets.len() - number);
        let course = run(target, time, seed, program, directory)?;
        match course {
            Ok(summary) => {
                kept += 1;
                println!("{}: {summary}", target.name);
            }
            Err((input, why)) => complain(&report(target.name, seed, &input, &why)),
        }
    }
    println!(
        "{kept} targets kept their rules under libFuzzer; seed {seed}, {} s",
        began.elapsed().as_secs()
    );
    Ok(())
}

/// Run one target. Return libFuzzer's summary, or the input that broke a rule, and the rule.
fn run(
    target: &FuzzTarget,
    time: Duration,
    seed: u64,
    program: &Path,
    directory: &Path,
) -> anyhow::Result<Result<String, (PathBuf, String)>> {
    let name = target.name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
    let corpus = directory.join(&name);
    let keep = || {
        std::fs::create_dir_all(&corpus)?;
        let mut seeds = target.seeds().enumerate();
        seeds.try_for_each(|(number, seed)| std::fs::write(corpus.join(format!("seed-{number}")), seed))
    };
    keep().with_context(|| format!("could not write to {}", corpus.display()))?;
    let found = std::env::temp_dir().join(format!("divvy-fuzz-{name}-{}-", std::process::id()));
    let output = Command::new(program)
        .env("DIVVY_FUZZ_TARGET", target.name)
        .arg(&corpus)
        .arg(format!("-seed={}", seed % u64::from(u32::MAX)))
        .arg(format!("-max_len={LONGEST}"))
        // The full length is used from the start, because growth beyond the input's size shows with long inputs.
        .arg("-len_control=0")
        .arg(format!("-timeout={ENDLESS_S}"))
        .arg(format!("-artifact_prefix={}", found.display()))
        // 0 is without an end.
        .arg(format!("-max_total_time={}", time.as_secs().max(1)))
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("could not start {}", program.display()))?;
    let log = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        // Such as `#4711 DONE   cov: 1625 ft: 5404 corp: 311/20Kb …`.
        return Ok(Ok(log
            .lines()
            .rfind(|line| line.contains(" cov: "))
            .unwrap_or_default()
            .to_owned()));
    }
    let is_found = |line: &str| Some(PathBuf::from(line.split_once("Test unit written to ")?.1));
    let input = log.lines().find_map(is_found).unwrap_or(found);
    // The panic's message is in the line after the one with its location.
    let said = log.lines().skip_while(|line| !line.contains("panicked at")).nth(1);
    let why = said.or_else(|| log.lines().find(|line| line.contains("ERROR: libFuzzer")));
    let tail = log.lines().last().unwrap_or("it printed nothing");
    Ok(Err((input, why.unwrap_or(tail).to_owned())))
}
