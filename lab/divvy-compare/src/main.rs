//! Plays the same scenarios to two device plugins on the simulated NVML, and compares what they do. This needs root, because each
//! plugin runs in a mount namespace of its own.

#![forbid(unsafe_code)]
#![allow(clippy::print_stdout, reason = "a program for a terminal")]

mod daemon;
mod intended;
mod kubelet;
mod mps;
mod play;
mod scenario;
mod scenarios;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use clap::{Parser, Subcommand};
use futures::{StreamExt as _, TryStreamExt as _};

use self::intended::{Intended, differences};
use self::play::{PlayOutcome, ProgramMeasures, measure, play};
use self::scenario::{ComparedProgram, PluginScenario};
use self::scenarios::all;

/// Compare Divvy with NVIDIA's device plugin on a simulated driver
#[derive(Debug, Parser)]
#[command(after_help = "\
Examples:
  divvy-compare --simulator target/debug/libdivvy_nvml_sim.so record nvidia-device-plugin --out nvidia.json
  divvy-compare --simulator target/debug/libdivvy_nvml_sim.so record --intended divvy-agent --out lab/divvy-compare/data/divvy.json
  divvy-compare --simulator target/debug/libdivvy_nvml_sim.so compare target/debug/divvy-agent nvidia.json")]
struct Cli {
    /// The simulated NVML
    #[arg(long, value_name = "FILE")]
    simulator: PathBuf,
    /// Play only scenarios whose name contains this text
    #[arg(long, value_name = "TEXT", default_value = "")]
    only: String,
    #[command(subcommand)]
    command: CompareCommand,
}

#[derive(Debug, Subcommand)]
enum CompareCommand {
    /// Play the scenarios to a program, and write what it did
    Record {
        /// The device plugin
        program: PathBuf,
        /// Play only the scenarios in which Divvy differs by intent
        #[arg(long)]
        intended: bool,
        /// Write to this file instead of the standard output
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Play the scenarios to a program, and compare with what NVIDIA's did
    Compare {
        /// Divvy's program
        ours: PathBuf,
        /// NVIDIA's program, or the file that `record` wrote
        theirs: PathBuf,
    },
    /// Measure how fast programs react, and what they need; takes a minute for each
    Measure {
        /// The device plugins, with optimization
        #[arg(required = true)]
        programs: Vec<PathBuf>,
    },
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<ExitCode> {
    let cli = Cli::parse();
    let scenarios: Vec<PluginScenario> = all()
        .into_iter()
        .filter(|scenario| scenario.name.contains(&cli.only))
        .collect();
    ensure!(!scenarios.is_empty(), "no scenario's name contains {:?}", cli.only);
    match &cli.command {
        CompareCommand::Record { program, intended, out } => {
            let reasons = Intended::read()?;
            let scenarios: Vec<PluginScenario> = scenarios
                .into_iter()
                .filter(|scenario| !intended || reasons.reason(scenario.name).is_some())
                .collect();
            let outcomes: Vec<PlayOutcome> = play_all(program, &cli.simulator, &scenarios).await?;
            let text = serde_json::to_string_pretty(&outcomes)? + "\n";
            match out {
                Some(path) => std::fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?,
                None => print!("{text}"),
            }
            Ok(ExitCode::SUCCESS)
        }
        CompareCommand::Measure { programs } => measure_all(programs, &cli.simulator).await,
        CompareCommand::Compare { ours, theirs } => {
            let theirs: Vec<PlayOutcome> = if theirs.extension().is_some_and(|extension| extension == "json") {
                let text = std::fs::read_to_string(theirs).with_context(|| format!("cannot read {}", theirs.display()))?;
                serde_json::from_str(&text)?
            } else {
                play_all(theirs, &cli.simulator, &scenarios).await?
            };
            let ours = play_all(ours, &cli.simulator, &scenarios).await?;
            let intended = Intended::read()?;
            let known: BTreeSet<&str> = all().iter().map(|scenario| scenario.name).collect();
            for name in intended.names() {
                ensure!(known.contains(name), "intended.toml names {name:?}, which is no scenario");
            }
            let (mut same, mut different, mut unexplained) = (0, 0, 0);
            for (scenario, our) in scenarios.iter().zip(&ours) {
                let their = theirs.iter().find(|outcome| outcome.name == scenario.name);
                let their = their.with_context(|| format!("{} is not recorded", scenario.name))?;
                match (differences(our, their), intended.reason(scenario.name)) {
                    (differences, None) if differences.is_empty() => {
                        same += 1;
                        println!("same       {}", scenario.name);
                    }
                    (differences, Some(reason)) if !differences.is_empty() => {
                        let surprises = intended.surprises(our);
                        if surprises.is_empty() {
                            different += 1;
                            println!("by intent  {}: {reason}", scenario.name);
                        } else {
                            unexplained += 1;
                            println!("UNEXPLAINED {}: it differs, but not as data/divvy.json says", scenario.name);
                            surprises.iter().for_each(|surprise| println!("  {surprise}"));
                        }
                    }
                    (_, Some(_)) => {
                        unexplained += 1;
                        println!("UNEXPLAINED {}: it is listed as different, but it is the same", scenario.name);
                    }
                    (differences, None) => {
                        unexplained += 1;
                        println!("UNEXPLAINED {}", scenario.name);
                        differences.iter().for_each(|difference| println!("  {difference}"));
                    }
                }
            }
            println!("{same} same, {different} different by intent, {unexplained} unexplained");
            Ok(if unexplained == 0 {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            })
        }
    }
}

async fn measure_all(programs: &[PathBuf], simulator: &Path) -> Result<ExitCode> {
    println!("registered   resident    idle CPU       XID    3 of 16   program");
    for program in programs {
        let ProgramMeasures {
            registered,
            resident_kib,
            idle_ms_per_minute,
            xid,
            preferred,
        } = measure(program, simulator).await?;
        let ms = |time: Duration| time.as_secs_f64() * 1000.0;
        println!(
            "{:7.1} ms  {:5.1} MiB  {idle_ms_per_minute:4} ms/min  {:6.2} ms  {:7.1} ms  {}",
            ms(registered),
            resident_kib as f64 / 1024.0,
            ms(xid),
            ms(preferred),
            program.display()
        );
    }
    Ok(ExitCode::SUCCESS)
}

/// How many scenarios are played at the same time. They mostly wait.
const AT_ONCE: usize = 10;

/// Play all scenarios, and return what the program did in each.
async fn play_all(program: &Path, simulator: &Path, scenarios: &[PluginScenario]) -> Result<Vec<PlayOutcome>> {
    let outcomes = scenarios.iter().enumerate().map(async |(number, scenario)| {
        let outcome = match scenario.program {
            ComparedProgram::MpsControlDaemon => daemon::play(program, simulator, scenario).await,
            ComparedProgram::DevicePlugin | ComparedProgram::FeatureDiscovery => play(program, simulator, scenario).await,
        };
        anyhow::Ok((number, outcome.with_context(|| scenario.name)?))
    });
    let played = futures::stream::iter(outcomes).buffer_unordered(AT_ONCE);
    let mut played: Vec<(usize, PlayOutcome)> = played.try_collect().await?;
    played.sort_by_key(|(number, _)| *number);
    Ok(played.into_iter().map(|(_, outcome)| outcome).collect())
}
