//! Plays the scenarios on a cluster, embedded or real, and says what came out: `cargo xtask suite`.

#![forbid(unsafe_code)]

mod leg;
mod real;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use divvy_testbed::scenario::Churn;
use divvy_testbed::scenario::suite::Scene;

/// Status of a leg that could not be played: neither passed nor failed.
const SKIPPED: u8 = 77;

/// Plays the scenarios on a cluster and checks each step
///
/// The same scenes are played on the embedded cluster, a fresh one for each, and on a real Kubernetes on this machine
/// (cargo xtask cluster up --nodes 2 --rbac; cargo xtask cluster divvy), one after another.
///
/// Status 0: every check holds. 1: one does not, or a scene could not go on. 77: there is no real cluster; nothing was tested.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask suite", version)]
struct Args {
    /// Scenes; all if none is named
    scenes: Vec<String>,
    /// On which cluster
    #[arg(long, value_enum, default_value_t = On::Embedded)]
    on: On,
    /// State of the real cluster
    #[arg(long, env = "CLUSTER_DIR", default_value_os_t = std::env::temp_dir().join("divvy-kube"))]
    cluster: PathBuf,
    /// Embedded: scenes that are played at once
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Seconds of scene churn
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    churn: u64,
    /// Dice of scene churn, and of all that the embedded cluster leaves to chance
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only failures and the sum
    #[arg(long, short)]
    quiet: bool,
    /// Names the scenes and ends
    #[arg(long)]
    list: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    /// In one process; only Kubernetes and the GPUs are simulated
    Embedded,
    /// Kubernetes' own programs; only the GPUs are simulated
    Real,
}

fn main() -> ExitCode {
    match run(Args::parse()) {
        Ok(code) => code,
        Err(error) => {
            say_error(&format!("error: {error:#}"));
            ExitCode::FAILURE
        }
    }
}

fn run(args: Args) -> anyhow::Result<ExitCode> {
    // Checked in any case: who brings a cluster up for a suite asks for the list first.
    let scenes = chosen(&args.scenes)?;
    if args.list {
        for scene in scenes {
            let (name, about) = scene.about();
            say(&format!("{name:<24} {about}\n"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let leg = leg::Leg {
        churn: Churn {
            time: Duration::from_secs(args.churn),
            seed: args.seed,
        },
        quiet: args.quiet,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let sum = match args.on {
        On::Embedded => runtime.block_on(leg.embedded(&scenes, args.jobs.max(1), args.seed))?,
        On::Real => match runtime.block_on(leg.real(&scenes, &args.cluster)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                say_error(&format!("{error}"));
                say("real Kubernetes: SKIPPED, nothing was tested on it\n");
                divvy_skip::step("real Kubernetes", error)?;
                return Ok(ExitCode::from(SKIPPED));
            }
            sum => sum?,
        },
    };
    say(&format!("\n{sum}\n"));
    for (name, reason) in sum.skips() {
        divvy_skip::step(&name, reason)?;
    }
    Ok(if sum.holds() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn chosen(names: &[String]) -> anyhow::Result<Vec<Scene>> {
    if names.is_empty() {
        return Ok(Scene::ALL.to_vec());
    }
    let find = |name: &String| {
        Scene::named(name).ok_or_else(|| anyhow::anyhow!("there is no scene {name:?}; `cargo xtask suite --list` names them"))
    };
    names.iter().map(find).collect()
}

#[expect(clippy::print_stdout, reason = "what is played is what this program is for")]
fn say(text: &str) {
    print!("{text}");
}

#[expect(clippy::print_stderr, reason = "a program's last words")]
fn say_error(text: &str) {
    eprintln!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scene_that_is_not_known_is_refused_even_when_only_the_list_is_asked_for() {
        let args = Args::try_parse_from(["suite", "--list", "tour", "nonsense"]).expect("the grammar allows it");
        let error = run(args).expect_err("there is no such scene").to_string();
        assert!(error.contains("\"nonsense\"") && error.contains("--list"), "{error}");
    }
}
