//! The command line.

use std::path::PathBuf;
use std::time::Duration;

pub(crate) const HELP: &str = "\
Gives broken input to everything that reads what others wrote, and holds it to rules. docs/fuzzing.md says what reads what, and who writes it

usage: fuzz [SECONDS [SEED]] [FLAGS]

All targets run at once, each on a thread of its own, until SECONDS (10) are over. What a seed (1) finds it finds again.

  --each SECONDS      of the processor's time: a target that has had as much ends. Without SECONDS this alone ends them
  --until FILE        ends when there is such a file, and not when SECONDS are over
  --at-least SECONDS  of the processor's time: before a target has had as much neither SECONDS nor FILE ends it (0)
  --only NAME[,NAME]  these targets alone, by names or what is in them
  --list              names the targets

Where targets share two processors, each has a thirtieth of a processor: `fuzz 60` gives it two seconds, `fuzz --each 60` takes half an hour.
What breaks a rule is written to a file in the folder for temporary files. Status 1: a rule is broken; 2: this is no such command line.

Examples:
  cargo run -p divvy-testbed --example fuzz -- 60
  cargo run -p divvy-testbed --example fuzz -- 60 $RANDOM --only 'CDI spec'
  nice -n 19 cargo run -p divvy-testbed --example fuzz -- --each 60";

/// What is to be done.
#[derive(Debug)]
pub(crate) enum Arguments {
    Help,
    List,
    Run(Run),
}

/// How long, where chance begins, and with which targets.
#[derive(Debug)]
pub(crate) struct Run {
    pub(crate) limits: Limits,
    pub(crate) seed: u64,
    /// None: all.
    pub(crate) only: Option<Vec<String>>,
}

/// When targets end.
#[derive(Debug, Clone)]
pub(crate) struct Limits {
    /// By the clock on the wall.
    pub(crate) wall: Option<Duration>,
    /// When this is there.
    pub(crate) until: Option<PathBuf>,
    /// Of the processor's time, for each.
    pub(crate) each: Option<Duration>,
    /// Of the processor's time, for each: before it neither `wall` nor `until` counts.
    pub(crate) at_least: Duration,
}

impl Arguments {
    /// The error is what is wrong, for a person.
    pub(crate) fn parse(words: impl IntoIterator<Item = String>) -> Result<Arguments, String> {
        let (mut numbers, mut until, mut each, mut at_least, mut only) = (Vec::new(), None, None, 0, None);
        let mut words = words.into_iter();
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or_else(|| format!("{word} needs a value"));
            match word.as_str() {
                "--help" | "-h" => return Ok(Arguments::Help),
                "--list" => return Ok(Arguments::List),
                "--until" => until = Some(PathBuf::from(value()?)),
                "--each" => each = Some(Duration::from_secs(number(&value()?)?)),
                "--at-least" => at_least = number(&value()?)?,
                "--only" => only = Some(value()?.split(',').map(str::to_owned).collect()),
                word => numbers.push(number(word)?),
            }
        }
        let (seconds, seed) = match numbers[..] {
            [] => (None, 1),
            [seconds] => (Some(seconds), 1),
            [seconds, seed] => (Some(seconds), seed),
            _ => return Err("there are more numbers than SECONDS and SEED".to_owned()),
        };
        if seconds.is_some() && until.is_some() {
            return Err("--until says when to end, and SECONDS, too: leave one of the two away".to_owned());
        }
        let ends = until.is_some() || each.is_some();
        Ok(Arguments::Run(Run {
            limits: Limits {
                wall: seconds.or((!ends).then_some(10)).map(Duration::from_secs),
                until,
                each,
                at_least: Duration::from_secs(at_least),
            },
            seed,
            only,
        }))
    }
}

fn number(word: &str) -> Result<u64, String> {
    word.parse().map_err(|_| format!("{word:?} is neither a flag nor a number"))
}
