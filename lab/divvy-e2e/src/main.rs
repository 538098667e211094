//! Play the scenes on a cluster, embedded or real, and report the results: `cargo xtask suite`.

#![forbid(unsafe_code)]

mod real;
mod suite_run;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use divvy_testbed::scenario::Churn;
use divvy_testbed::scenario::suite::Scene;

/// The exit status of a run that was not possible: neither passed nor failed.
const SKIPPED: u8 = 77;

/// Play the scenes on a cluster and check each step
///
/// The same scenes are played on the embedded cluster, with a new cluster for each scene, and on a real Kubernetes on this machine
/// (cargo xtask cluster up --nodes 3 --rbac; cargo xtask cluster divvy), one after another.
///
/// Status 0: every check holds. 1: a check failed, or a scene could not go on. 77: there is no real cluster, so nothing was tested.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask suite", version)]
struct Args {
    /// Scenes to play; all if none is named
    scenes: Vec<String>,
    /// Cluster on which to play
    #[arg(long, value_enum, default_value_t = On::Embedded)]
    on: On,
    /// Directory with the state of the real cluster
    #[arg(long, env = "CLUSTER_DIR", default_value_os_t = std::env::temp_dir().join("divvy-cluster"))]
    cluster: PathBuf,
    /// Number of scenes to play at once on embedded clusters
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Duration of the scene churn
    #[arg(long, default_value_t = 20, value_name = "SECONDS")]
    churn: u64,
    /// Seed of the scene churn, and of everything that the embedded cluster leaves to chance
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print only failures and the summary
    #[arg(long, short)]
    quiet: bool,
    /// Print the names of the scenes and exit
    #[arg(long)]
    list: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    /// One process; only Kubernetes and the GPUs are simulated
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
    // The names are checked even with --list, because a caller that brings up a cluster for a suite runs --list first.
    let scenes = chosen(&args.scenes)?;
    if args.list {
        for scene in scenes {
            let (name, about) = scene.about();
            say(&format!("{name:<24} {about}\n"));
        }
        return Ok(ExitCode::SUCCESS);
    }
    let leg = suite_run::Leg {
        churn: Churn {
            time: Duration::from_secs(args.churn),
            seed: args.seed,
        },
        quiet: args.quiet,
        are_named: !args.scenes.is_empty(),
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
        Scene::named(name)
            .ok_or_else(|| anyhow::anyhow!("there is no scene {name:?}; run `cargo xtask suite --list` for their names"))
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
    fn even_a_list_refuses_an_unknown_scene() {
        let args = Args::try_parse_from(["suite", "--list", "tour", "nonsense"]).expect("the grammar allows it");
        let error = run(args).expect_err("there is no such scene").to_string();
        assert!(error.contains("\"nonsense\"") && error.contains("--list"), "{error}");
    }
}
