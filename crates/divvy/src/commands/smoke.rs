//! `divvy smoke`: on the GPUs of a cluster, on this machine, or in a container of an engine.

mod carried;
mod cluster;
mod local;

use std::path::Path;

use clap::Parser as _;
use divvy_smoke_report::SmokeOutcome;

use crate::cli::smoke::SmokeArgs;
use crate::cli::{AccessArgs, Cli, DivvyCommand};

/// Run the test, and return the exit status.
pub async fn run(args: SmokeArgs) -> anyhow::Result<u8> {
    let done = match local::command(&args) {
        Some(command) => command.and_then(|command| local::replace(command, &args)),
        None => cluster::run(&args).await,
    };
    // An error before the end proves nothing about a GPU.
    done.or_else(|error| match error.downcast_ref::<std::io::Error>() {
        Some(cause) if cause.kind() == std::io::ErrorKind::BrokenPipe => Err(error),
        _ => {
            divvy_program::fail(&error);
            Ok(SmokeOutcome::Skip.exit_status())
        }
    })
}

/// Run the test after `divvy doctor`: on this machine, or on the cluster with these flags. Return the exit status in the words of `divvy doctor`, in which
/// 2 also means that something could not be tried.
pub(super) async fn after_doctor(cluster: Option<&AccessArgs>) -> anyhow::Result<u8> {
    let place = if cluster.is_some() { "--all-nodes" } else { "--here" };
    let DivvyCommand::Smoke(mut args) = Cli::try_parse_from(["divvy", "smoke", place])?.command else {
        anyhow::bail!("divvy smoke {place} is not understood");
    };
    let status = match cluster {
        Some(access) => {
            args.cluster.access = access.clone();
            run(*args).await?
        }
        None => local::status(&args).unwrap_or_else(|error| {
            divvy_program::fail(&error);
            SmokeOutcome::Fail.exit_status()
        }),
    };
    Ok(status.min(SmokeOutcome::Fail.exit_status()))
}

/// Remove what a run on a cluster left when it was killed.
pub(super) async fn clean_up() -> anyhow::Result<()> {
    cluster::cleaner::run().await
}

/// Copy `divvy-smoke` and what it needs to a directory, for a container of another image.
pub(super) fn copy_to(directory: &Path) -> anyhow::Result<()> {
    carried::copy_to(directory)
}

/// Return the arguments of `divvy-smoke` that choose what it does.
fn what(args: &SmokeArgs) -> Vec<String> {
    let flags = [
        ("--isolation", args.isolation),
        ("--all-memory", args.all_memory),
        ("--tensor", args.tensor),
    ];
    let mut words: Vec<String> = flags
        .into_iter()
        .filter(|(_, is_set)| *is_set)
        .map(|(flag, _)| flag.to_owned())
        .collect();
    if let Some(steps) = &args.steps {
        words.extend(["--steps".to_owned(), steps.clone()]);
    }
    words
}
