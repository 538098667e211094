//! The command line.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::path::PathBuf;
use std::time::{Duration, Instant};

const AFTER: &str = "\
If all targets share two processors, each gets a thirtieth of a processor: `fuzz 60` gives each two seconds, and `fuzz --each 60` takes half an hour.
An input that breaks a rule is written to a file in the directory for temporary files, and the command that replays it is printed.
Exit status: 0 if all rules held; 1 if a rule was broken; 2 if the command line is invalid.

Examples:
  cargo run -p divvy-fuzz -- 60
  cargo run -p divvy-fuzz -- 60 --seed 7 --only 'CDI spec'
  cargo run -p divvy-fuzz -- --only 'CDI spec' --replay /tmp/divvy-fuzz-CDI-spec-1
  cargo xtask fuzz --each 60";

/// Give broken input to all parsers of input from outside, and check rules. docs/fuzzing.md lists the parsers and who writes their input.
///
/// All targets run at once, each on a separate thread, until SECONDS have passed.
#[derive(Debug, clap::Parser)]
#[command(name = "fuzz", after_help = AFTER, max_term_width = 140)]
pub(crate) struct FuzzArguments {
    /// End after this time; 10 without --each
    seconds: Option<u64>,
    /// End a target that has had this much processor time; with --guided, this much time
    #[arg(long, value_name = "SECONDS")]
    each: Option<u64>,
    /// Run only these targets; part of a name is enough
    #[arg(long, value_name = "NAME,...", value_delimiter = ',')]
    pub(crate) only: Vec<String>,
    /// Seed of the random changes: the same seed produces the same inputs. Random and printed if absent
    #[arg(long)]
    seed: Option<u64>,
    /// Read this input once instead of fuzzing; --only must name one target
    #[arg(long, value_name = "FILE", requires = "only")]
    pub(crate) replay: Option<PathBuf>,
    /// Let libFuzzer choose the inputs: divvy-fuzz-guided, as `cargo xtask fuzz` builds it. Targets run one after the other
    #[arg(long, value_name = "PROGRAM")]
    pub(crate) guided: Option<PathBuf>,
    /// Directory in which libFuzzer keeps inputs that reached new code, and from which it continues; temporary if absent
    #[arg(long, value_name = "DIRECTORY", requires = "guided")]
    pub(crate) corpus: Option<PathBuf>,
    /// Print the targets' names
    #[arg(long)]
    pub(crate) list: bool,
}

/// The conditions that end targets.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndConditions {
    /// The wall-clock time after which targets end.
    pub(crate) wall: Option<Duration>,
    /// The processor time after which a target ends; under libFuzzer, the time.
    pub(crate) each: Option<Duration>,
}

impl EndConditions {
    /// Report whether all targets must end.
    pub(crate) fn are_reached(self, began: Instant) -> bool {
        self.wall.is_some_and(|wall| began.elapsed() >= wall)
    }

    /// Return the time of the next of several targets that run one after the other.
    pub(crate) fn time_of_next(self, began: Instant, targets: usize) -> Duration {
        let targets = u32::try_from(targets).unwrap_or(u32::MAX).max(1);
        let share = self.wall.map(|wall| wall.saturating_sub(began.elapsed()) / targets);
        self.each.into_iter().chain(share).min().unwrap_or_default()
    }
}

impl FuzzArguments {
    pub(crate) fn ends(&self) -> EndConditions {
        let default = self.each.is_none().then_some(10);
        EndConditions {
            wall: self.seconds.or(default).map(Duration::from_secs),
            each: self.each.map(Duration::from_secs),
        }
    }

    /// Return the given seed, or a new one.
    pub(crate) fn seed(&self) -> u64 {
        // Short enough to be typed; libFuzzer accepts 32 bits.
        self.seed
            .unwrap_or_else(|| RandomState::new().build_hasher().finish() & u64::from(u32::MAX >> 1))
    }
}
