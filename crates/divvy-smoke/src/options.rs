//! The program's command line.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use divvy_smoke_report::StepId;
use serde::{Deserialize, Serialize};

/// The text of `--help`.
pub(crate) const HELP: &str = "\
divvy-smoke proves that a GPU computes: it runs kernels through CUDA's driver and compares every
byte of their results. It uses at most half of the memory that it may use, and at most 256 MiB
besides a context, so it may run next to other programs. It needs no CUDA in the image.

Usage:
  divvy-smoke here [OPTIONS]        run the steps on a GPU of this container or machine
  divvy-smoke vector-add [OPTIONS]  do what CUDA's sample vectorAdd does, and print the same lines

Steps:
  S01 driver        load libcuda.so.1, and describe the GPU
  S02 vector add    add two vectors of 50,000 elements
  S03 memory        fill and compare memory with four patterns
  S04 matrix        multiply matrices of f32 and f64
  S05 tensor cores  multiply matrices of bf16 (compute capability 8.0 or higher, GPU not shared)
  S06 copies        copy to the GPU, from it, and within it
  S07 share         compare the memory that the driver shows with the container's share
  S08 health        ask divvy-probe, if it is there, as on a node
  S09 accounting    let two processes use one share; only with --isolation

Options:
  --steps LIST      Steps by id or name, separated by commas: S02,memory. S01 always runs.
                    Default: all
  --isolation       Allocate memory up to the limit in S07 and S09, and check that more is refused
  --all-memory      Test all memory that is free in S03, not only 256 MiB. Nothing else can use it
                    meanwhile
  --tensor          Run S05 on a shared GPU, too: it loads the GPU fully for a moment
  --gpu GPU         UUID, a prefix of it that only one GPU has, or index. Default: 0
  --timeout TIME    Give up after this time: 90s, 2m, 500ms, or seconds. Default: 120s
  --via WAY         How functions are found: dlsym, as old programs do, or getprocaddress.
                    Default: dlsym
  -o, --output FORM text, or json. Default: text
  --termination-message FILE
                    Also write the result as JSON of at most 4096 bytes, for Kubernetes
  --help, --version

Environment: NODE_NAME and POD_NAME become part of the result.

Examples:
  divvy-smoke here
  divvy-smoke here --steps memory -o json | jq .result
  divvy-smoke here --isolation --gpu GPU-8f0a
  divvy-smoke here --steps memory --all-memory --timeout 10m

Exit status of here: 0 passed, 1 a warning, 2 failed, 3 could not be tried (no GPU was given, or
the command line is wrong). Of vector-add: 0 passed, 1 not.
";

/// How functions of the driver's library are found.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Via {
    /// By their symbols.
    #[default]
    Dlsym,
    /// By `cuGetProcAddress`, as CUDA's runtime library does since version 11.3.
    GetProcAddress,
}

/// The program's command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SmokeCommand {
    /// Run the steps.
    Here(SmokeOptions),
    /// Print what CUDA's sample prints.
    VectorAdd(SmokeOptions),
    /// Make the calls of the driver. The program starts itself with this command.
    Worker(String),
    Help,
    Version,
}

/// The options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SmokeOptions {
    pub(crate) steps: Vec<StepId>,
    pub(crate) isolation: bool,
    pub(crate) tensor: bool,
    pub(crate) all_memory: bool,
    pub(crate) gpu: Option<String>,
    pub(crate) timeout: Duration,
    pub(crate) via: Via,
    pub(crate) json: bool,
    pub(crate) termination_message: Option<PathBuf>,
}

impl Default for SmokeOptions {
    fn default() -> SmokeOptions {
        SmokeOptions {
            steps: StepId::ALL.to_vec(),
            isolation: false,
            tensor: false,
            all_memory: false,
            gpu: None,
            timeout: Duration::from_secs(120),
            via: Via::default(),
            json: false,
            termination_message: None,
        }
    }
}

/// The error for a wrong command line.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}\nTry: divvy-smoke --help")]
pub(crate) struct SmokeUsageError(String);

impl From<lexopt::Error> for SmokeUsageError {
    fn from(error: lexopt::Error) -> SmokeUsageError {
        SmokeUsageError(error.to_string())
    }
}

/// The command with which the program starts itself.
pub(crate) const WORKER: &str = "worker";

impl SmokeCommand {
    /// Parse the arguments, without the program's name.
    pub(crate) fn parse(arguments: impl IntoIterator<Item = OsString>) -> Result<SmokeCommand, SmokeUsageError> {
        use lexopt::prelude::*;
        let mut parser = lexopt::Parser::from_args(arguments);
        let mut options = SmokeOptions::default();
        let mut command = None;
        while let Some(argument) = parser.next()? {
            match argument {
                Value(word) if command.is_none() => command = Some(text(word)?),
                Value(word) if command.as_deref() == Some(WORKER) => return Ok(SmokeCommand::Worker(text(word)?)),
                Long("help") | Short('h') => return Ok(SmokeCommand::Help),
                Long("version") | Short('V') => return Ok(SmokeCommand::Version),
                Long("steps") => options.steps = steps(&text(parser.value()?)?)?,
                Long("isolation") => options.isolation = true,
                Long("tensor") => options.tensor = true,
                Long("all-memory") => options.all_memory = true,
                Long("gpu") => options.gpu = Some(text(parser.value()?)?),
                Long("timeout") => options.timeout = time(&text(parser.value()?)?)?,
                Long("via") => {
                    options.via = match text(parser.value()?)?.as_str() {
                        "dlsym" => Via::Dlsym,
                        "getprocaddress" => Via::GetProcAddress,
                        other => {
                            return Err(SmokeUsageError(format!(
                                "--via {other} is unknown; write dlsym or getprocaddress"
                            )));
                        }
                    }
                }
                Long("output") | Short('o') => {
                    options.json = match text(parser.value()?)?.as_str() {
                        "text" => false,
                        "json" => true,
                        other => return Err(SmokeUsageError(format!("-o {other} is unknown; write text or json"))),
                    }
                }
                Long("termination-message") => options.termination_message = Some(parser.value()?.into()),
                Short(letter) => return Err(SmokeUsageError(format!("there is no flag -{letter}"))),
                Long(flag) => return Err(SmokeUsageError(format!("there is no flag --{flag}"))),
                Value(word) => return Err(SmokeUsageError(format!("unexpected argument {:?}", word.to_string_lossy()))),
            }
        }
        match command.as_deref() {
            Some("here") => Ok(SmokeCommand::Here(options)),
            Some("vector-add") => Ok(SmokeCommand::VectorAdd(options)),
            Some(other) => Err(SmokeUsageError(format!(
                "there is no command {other}; write here or vector-add"
            ))),
            None => Err(SmokeUsageError("specify a command: here or vector-add".to_owned())),
        }
    }
}

fn text(value: OsString) -> Result<String, SmokeUsageError> {
    value
        .into_string()
        .map_err(|value| SmokeUsageError(format!("{:?} is not UTF-8", value.to_string_lossy())))
}

fn steps(list: &str) -> Result<Vec<StepId>, SmokeUsageError> {
    let mut steps = list
        .split(',')
        .map(str::trim)
        .map(|word| {
            let known = StepId::parse(word).or_else(|| StepId::parse(&word.replace('-', " ")));
            known.ok_or_else(|| {
                SmokeUsageError(format!(
                    "--steps {word}: there is no such step; write ids such as S03, or names such as memory"
                ))
            })
        })
        .collect::<Result<Vec<StepId>, SmokeUsageError>>()?;
    steps.push(StepId::S01);
    steps.sort_unstable();
    steps.dedup();
    Ok(steps)
}

fn time(text: &str) -> Result<Duration, SmokeUsageError> {
    let (number, unit) = match text {
        text if text.ends_with("ms") => (text.strip_suffix("ms"), 1),
        text if text.ends_with('m') => (text.strip_suffix('m'), 60_000),
        text => (text.strip_suffix('s').or(Some(text)), 1000),
    };
    let number = number.and_then(|number| number.parse::<u64>().ok());
    let ms = number
        .and_then(|number| number.checked_mul(unit))
        .filter(|ms| (100..=86_400_000).contains(ms));
    let wrong = || {
        SmokeUsageError(format!(
            "--timeout {text} is not a time from 100ms to 1 day; write 90s, 2m, 500ms, or seconds"
        ))
    };
    ms.map(Duration::from_millis).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<SmokeCommand, SmokeUsageError> {
        SmokeCommand::parse(line.split_whitespace().map(OsString::from))
    }

    #[test]
    fn options_are_read_in_any_order() {
        let expected = SmokeOptions {
            steps: vec![StepId::S01, StepId::S03, StepId::S05],
            isolation: true,
            tensor: true,
            all_memory: true,
            gpu: Some("GPU-1".to_owned()),
            timeout: Duration::from_millis(2500),
            via: Via::GetProcAddress,
            json: true,
            termination_message: Some("/dev/termination-log".into()),
        };
        let line = "--isolation here --steps=memory,S05,tensor-cores --tensor --all-memory --gpu GPU-1 --timeout 2500ms --via getprocaddress -ojson \
                    --termination-message /dev/termination-log";
        assert_eq!(parse(line), Ok(SmokeCommand::Here(expected)));
        assert_eq!(parse("vector-add"), Ok(SmokeCommand::VectorAdd(SmokeOptions::default())));
        assert_eq!(parse("worker {}"), Ok(SmokeCommand::Worker("{}".to_owned())));
        for (text, seconds) in [("90s", 90), ("2m", 120), ("7", 7)] {
            assert_eq!(time(text), Ok(Duration::from_secs(seconds)));
        }
        assert_eq!(
            (parse("here --help"), parse("-V")),
            (Ok(SmokeCommand::Help), Ok(SmokeCommand::Version))
        );
    }

    #[test]
    fn a_wrong_command_line_is_refused_with_what_to_write() {
        for (line, part) in [
            ("", "specify a command: here or vector-add"),
            ("there", "there is no command there"),
            ("here --step S01", "there is no flag --step"),
            ("here -x", "there is no flag -x"),
            ("here now", "unexpected argument \"now\""),
            ("here --steps S10", "--steps S10: there is no such step"),
            ("here --steps=", "there is no such step"),
            ("here --timeout 0", "--timeout 0 is not a time"),
            ("here --timeout 2.5", "is not a time"),
            ("here --timeout 99999999999999999999m", "is not a time"),
            ("here --timeout 2h", "is not a time"),
            ("here --timeout", "--timeout"),
            ("here --via ld", "write dlsym or getprocaddress"),
            ("here -o table", "write text or json"),
            ("here --tensor=1", "--tensor"),
            ("worker", "there is no command worker"),
        ] {
            let SmokeUsageError(error) = parse(line).expect_err(line);
            assert!(error.contains(part), "{line}: {error}");
        }
    }

    #[test]
    fn the_help_names_each_step() {
        for id in StepId::ALL {
            assert!(HELP.contains(&format!("  {} {}", id.word(), id.title())), "{id:?}");
        }
        assert!(HELP.lines().all(|line| line.len() <= 100));
    }
}
