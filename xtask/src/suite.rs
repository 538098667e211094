//! `cargo xtask suite`: the scenes on both kinds of cluster.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result};

use crate::cargo::build_workspace;
use crate::target_directory::debug_directory;
use crate::{build, cluster};

const HELP: &str = "\
Play the scenes and check each step, first on the embedded cluster, then on a real Kubernetes

usage: cargo xtask suite [--on embedded|real] [SCENE...] [FLAGS]

If a cluster of `cargo xtask cluster` is up with Divvy on it, the suite uses it as the real Kubernetes. Otherwise the suite starts one (three
nodes, RBAC, service accounts; built first if necessary), installs Divvy on it as a user does (`cargo xtask image`, the Helm chart), and
stops it afterwards. If that is not possible (no root, no Go, ...), the suite prints what is missing and skips the real Kubernetes. With
`--on real` the exit status is then 77.

  --list            list the scenes
  --churn SECONDS   duration of the scene churn [default: 20]
  --seed N          seed of the random choices of the scene churn and of the embedded cluster
  --jobs N          number of parallel scenes on the embedded cluster [default: 2]
  --quiet           print only failures and the summary

Examples:
  cargo xtask suite
  cargo xtask suite --on real node-reboots churn --churn 600";

/// The exit status if the scenes could not be played on a kind of cluster.
const SKIPPED: u8 = 77;

pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    if args.iter().any(|arg| matches!(*arg, "--help" | "-h")) {
        #[expect(clippy::print_stdout, reason = "requested help is output")]
        {
            println!("{HELP}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let on = args
        .windows(2)
        .find(|pair| pair[0] == "--on")
        .map(|pair| pair[1])
        .or_else(|| args.iter().find_map(|arg| arg.strip_prefix("--on=")));
    build_workspace()?;
    build::guard()?;
    if args.contains(&"--list") {
        return Ok(ExitCode::from(play(args, Stdio::inherit())?));
    }
    // Report an unknown argument now, before a cluster is started for it.
    let known = play(&[args, &["--list"]].concat(), Stdio::null())?;
    if known != 0 {
        return Ok(ExitCode::from(known));
    }
    let embedded = match on {
        Some("real") => 0,
        _ => play_on("embedded", on, args)?,
    };
    let real = match on {
        Some("embedded") => 0,
        _ => real(on, args)?,
    };
    Ok(ExitCode::from(match (embedded, real) {
        (0, SKIPPED) if on.is_none() => 0,
        (0, other) => other,
        (failed, _) => failed,
    }))
}

/// Play the suite on one kind of cluster, if `args` do not already choose one. Return the exit status.
fn play_on(kind: &str, on: Option<&str>, args: &[&str]) -> Result<u8> {
    let chosen = ["--on", kind];
    play(
        &[if on.is_none() { &chosen[..] } else { &[] }, args].concat(),
        Stdio::inherit(),
    )
}

fn play(args: &[&str], output: Stdio) -> Result<u8> {
    let program = debug_directory().join("divvy-e2e");
    let status = Command::new(&program).args(args).stdout(output).status();
    let status = status.with_context(|| format!("{} could not be run", program.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// Play the suite on the running cluster, or on a new one.
fn real(on: Option<&str>, args: &[&str]) -> Result<u8> {
    if cluster::has_divvy() {
        return play_on("real", on, args);
    }
    if let Some(missing) = crate::image::missing() {
        say(&format!("SKIPPED: {missing}"));
        divvy_skip::step("real Kubernetes", missing)?;
        return Ok(skipped());
    }
    let own = !cluster::is_up();
    let flags = ["up", "--nodes", "3", "--rbac", "--service-accounts"];
    let played = match if own { cluster::script(&flags)? } else { 0 } {
        0 => install_and_play(on, args),
        SKIPPED => return Ok(skipped()),
        failed => Ok(failed),
    };
    if own {
        // Keep the programs' logs if a scene failed.
        let sound = matches!(played, Ok(0));
        let left = cluster::script(if sound { &["down"] } else { &["down", "--keep-logs"] })?;
        if sound {
            return Ok(left);
        }
    }
    played
}

fn install_and_play(on: Option<&str>, args: &[&str]) -> Result<u8> {
    match cluster::script(&["install", "--no-check"])? {
        0 => play_on("real", on, args),
        failed => Ok(failed),
    }
}

fn skipped() -> u8 {
    say("real Kubernetes: SKIPPED, nothing was tested on it");
    SKIPPED
}

#[expect(clippy::print_stdout, reason = "the summary of a run")]
fn say(text: &str) {
    println!("{text}");
}
