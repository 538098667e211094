//! The scenarios on both kinds of cluster.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context as _, Result};

use crate::{build, cluster};

const HELP: &str = "\
Plays the scenarios and checks each step, first on the embedded cluster, then on a real Kubernetes

usage: cargo xtask suite [--on embedded|real] [SCENE...] [FLAGS]

The real one is the cluster of `cargo xtask cluster` if one is up with Divvy on it. Else one is brought up for the suite (two nodes, RBAC,
service accounts; built first if need be), Divvy is installed on it as a user does (`cargo xtask image`, the Helm chart), and it is taken
down again. Where that cannot be (no root, no Go, ...) it is said what is missing, and that leg is skipped: status 77 with `--on real`.

  --list            names the scenes
  --churn SECONDS   how long scene churn takes (20)
  --seed N          its dice, and all that the embedded cluster leaves to chance
  --jobs N          embedded: scenes at once (2)
  --quiet           only failures and the sum

Examples:
  cargo xtask suite
  cargo xtask suite --on real node-reboots churn --churn 600";

/// Status of a leg that could not be played.
const SKIPPED: u8 = 77;

pub(crate) fn run(args: &[&str]) -> Result<ExitCode> {
    if args.iter().any(|arg| matches!(*arg, "--help" | "-h")) {
        #[expect(clippy::print_stdout, reason = "help that was asked for is data")]
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
    build::programs()?;
    if args.contains(&"--list") {
        return Ok(ExitCode::from(play(args, Stdio::inherit())?));
    }
    // A word that the suite does not know is said now, and not when a cluster has been brought up for it.
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

/// The suite on one kind of cluster, whatever `args` leave open. Gives its status.
fn play_on(kind: &str, on: Option<&str>, args: &[&str]) -> Result<u8> {
    let chosen = ["--on", kind];
    play(
        &[if on.is_none() { &chosen[..] } else { &[] }, args].concat(),
        Stdio::inherit(),
    )
}

fn play(args: &[&str], output: Stdio) -> Result<u8> {
    let program = build::debug_folder().join("divvy-e2e");
    let status = Command::new(&program).args(args).stdout(output).status();
    let status = status.with_context(|| format!("{} could not be run", program.display()))?;
    Ok(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// On the cluster that is up, or on one of its own.
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
    let flags = ["up", "--nodes", "2", "--rbac", "--service-accounts"];
    let played = match if own { cluster::script(&flags)? } else { 0 } {
        0 => install_and_play(on, args),
        SKIPPED => return Ok(skipped()),
        failed => Ok(failed),
    };
    if own {
        // What the programs said is worth keeping when something failed.
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

#[expect(clippy::print_stdout, reason = "the sum of a leg")]
fn say(text: &str) {
    println!("{text}");
}
