//! The command line.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use crate::checks::Check;
use crate::driver::DriverChoice;

pub(crate) const USAGE: &str = "usage: divvy-gpu-check [FLAGS]

Check Divvy's probe, agent, guard, and divvy-smoke on the first NVIDIA GPU of this machine, which nothing else should use meanwhile.

  --report DIR    directory for report.md and report.json, which are written after each check [default: gpu-report]
  --simulated     use the simulated driver
  --driver DIR    use libcuda.so.1 and libnvidia-ml.so.1 of this directory [default: those that programs find]
  --check NAME    run only this check, and others that are named the same way [default: all]
  --seconds N     how long a share of compute time is measured [default: 10]
  --time N        end after so many seconds: the check that runs is stopped, and no other one begins [default: 540]

Checks: facts, inventory, nvml, memory, sizes, kinds, smoke, compute, overhead, programs, escapes, demo. docs/gpu-checks.md says what each does.

Exit status: 0 no check failed, 1 a check failed, 2 the checks could not begin.";

/// What to do.
#[derive(Debug)]
pub(crate) struct GpuCheckArguments {
    pub(crate) report: PathBuf,
    pub(crate) driver: DriverChoice,
    pub(crate) checks: Vec<Check>,
    pub(crate) seconds: u64,
    pub(crate) time: Duration,
}

impl GpuCheckArguments {
    /// Read the words after the program's name. `None`: only the help is wanted.
    pub(crate) fn parse(words: impl IntoIterator<Item = String>) -> Result<Option<GpuCheckArguments>> {
        let mut words = words.into_iter();
        let mut arguments = GpuCheckArguments {
            report: "gpu-report".into(),
            driver: DriverChoice::Found,
            checks: Vec::new(),
            seconds: 10,
            time: Duration::from_secs(540),
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value\n\n{USAGE}"));
            match word.as_str() {
                "--help" | "-h" => return Ok(None),
                "--report" => arguments.report = value()?.into(),
                "--simulated" => arguments.driver = DriverChoice::Simulated,
                "--driver" => arguments.driver = DriverChoice::Directory(value()?.into()),
                "--check" => arguments.checks.push(named(&value()?)?),
                "--seconds" => arguments.seconds = number(&value()?)?,
                "--time" => arguments.time = Duration::from_secs(number(&value()?)?),
                _ => bail!("{word} is unknown\n\n{USAGE}"),
            }
        }
        if arguments.checks.is_empty() {
            arguments.checks = Check::ALL.to_vec();
        }
        Ok(Some(arguments))
    }
}

fn number(text: &str) -> Result<u64> {
    match text.parse() {
        Ok(number @ 1..=1000) => Ok(number),
        _ => bail!("{text} is not a number from 1 to 1000"),
    }
}

fn named(name: &str) -> Result<Check> {
    let found = Check::ALL.into_iter().find(|check| check.name() == name);
    found.with_context(|| format!("there is no check {name}; the checks are {}", names()))
}

fn names() -> String {
    Check::ALL.map(|check| check.name()).join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Option<GpuCheckArguments>> {
        GpuCheckArguments::parse(line.split_whitespace().map(str::to_owned))
    }

    #[test]
    fn a_wrong_command_line_is_refused_with_what_to_write() {
        for (line, part) in [
            ("--bogus", "--bogus is unknown"),
            ("memory", "memory is unknown"),
            ("--report", "--report needs a value"),
            ("--seconds x", "x is not a number"),
            ("--time 0", "0 is not a number from 1"),
            ("--check bogus", "the checks are facts, inventory"),
        ] {
            let error = parse(line).expect_err(line).to_string();
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn all_checks_run_unless_some_are_named_and_the_help_lists_them() {
        let checks = |line: &str| parse(line).expect("valid").map(|arguments| arguments.checks);
        assert_eq!(checks("--simulated"), Some(Check::ALL.to_vec()));
        assert_eq!(checks("--check nvml --check facts"), Some(vec![Check::Nvml, Check::Facts]));
        assert_eq!(checks("--help"), None);
        assert!(USAGE.contains(&names()), "{}", names());
    }
}
