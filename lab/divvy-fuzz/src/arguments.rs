//! The command line.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const AFTER: &str = "\
Where all targets share two processors, each gets a thirtieth of a processor: `fuzz 60` gives it two seconds, `fuzz --each 60` takes half an hour.
An input that breaks a rule is written to a file in the folder for temporary files, and the command that replays it is printed.
Exit status 1: a rule is broken; 2: the command line is wrong.

Examples:
  cargo run -p divvy-fuzz -- 60
  cargo run -p divvy-fuzz -- 60 --seed 7 --only 'CDI spec'
  cargo run -p divvy-fuzz -- --only 'CDI spec' --replay /tmp/divvy-fuzz-CDI-spec-1
  cargo xtask fuzz --each 60";

/// Gives broken input to everything that reads what others wrote, and checks rules. docs/fuzzing.md says what reads what, and who writes it.
///
/// All targets run at once, each on a thread of its own, until SECONDS are over.
#[derive(Debug, clap::Parser)]
#[command(name = "fuzz", after_help = AFTER, max_term_width = 140)]
pub(crate) struct Arguments {
    /// Ends after this time; 10 if neither --each nor --until ends it
    seconds: Option<u64>,
    /// Ends a target that has had this much processor time
    #[arg(long, value_name = "SECONDS")]
    each: Option<u64>,
    /// Ends when this file exists
    #[arg(long, value_name = "FILE", conflicts_with = "seconds")]
    until: Option<PathBuf>,
    /// Processor time that each target gets before SECONDS or --until can end it
    #[arg(long, value_name = "SECONDS", default_value_t = 0)]
    at_least: u64,
    /// Runs only these targets; part of a name is enough
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Where chance begins: the same seed makes the same inputs. Random and printed if absent
    #[arg(long)]
    seed: Option<u64>,
    /// Reads this input once instead of fuzzing; --only must name one target
    #[arg(long, value_name = "FILE", requires = "only")]
    pub(crate) replay: Option<PathBuf>,
    /// Lets libFuzzer choose the inputs: divvy-fuzz-guided, as `cargo xtask fuzz` builds it. Targets run one after the other
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) guided: Option<PathBuf>,
    /// Where libFuzzer keeps inputs that reached new code, and takes up from; a temporary folder if absent
    #[arg(long, value_name = "FOLDER", requires = "guided")]
    pub(crate) corpus: Option<PathBuf>,
    /// Prints the targets' names
    #[arg(long)]
    pub(crate) list: bool,
}

/// When targets end.
#[derive(Debug, Clone)]
pub(crate) struct Ends {
    /// By the clock on the wall.
    pub(crate) wall: Option<Duration>,
    /// When this file exists.
    pub(crate) until: Option<PathBuf>,
    /// Processor time of each target.
    pub(crate) each: Option<Duration>,
    /// Processor time of each target before `wall` or `until` counts.
    pub(crate) at_least: Duration,
}

impl Ends {
    /// Whether the time is over for targets that have had what they get at least.
    pub(crate) fn are_reached(&self, began: Instant) -> bool {
        let wall = self.wall.is_some_and(|wall| began.elapsed() >= wall);
        wall || self.until.as_ref().is_some_and(|file| file.exists())
    }
}

impl Arguments {
    pub(crate) fn ends(&self) -> Ends {
        let endless = self.until.is_none() && self.each.is_none();
        Ends {
            wall: self.seconds.or(endless.then_some(10)).map(Duration::from_secs),
            until: self.until.clone(),
            each: self.each.map(Duration::from_secs),
            at_least: Duration::from_secs(self.at_least),
        }
    }

    /// The seed that was given, or a new one.
    pub(crate) fn seed(&self) -> u64 {
        // Short enough to be typed; libFuzzer takes 32 bits.
        self.seed
            .unwrap_or_else(|| RandomState::new().build_hasher().finish() & u64::from(u32::MAX >> 1))
    }
}
