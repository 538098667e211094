//! `divvy doctor --fix`: makes the repairs that the failed checks offer.

use std::path::Path;

use anyhow::Context as _;
use clap::Parser as _;
use divvy_doctor::{DoctorReport, Repair};

use super::{repairable, say};
use crate::cli::cdi::CdiCommand;
use crate::cli::{Cli, DivvyCommand};

/// Make all repairs that the report offers, and report each repair on standard error. A repair that fails does not stop the
/// others. Return whether the report offered any repair.
pub(super) async fn all(report: &DoctorReport) -> anyhow::Result<bool> {
    let mut any = false;
    for line in repairable(report) {
        for repair in &line.repairs {
            any = true;
            match one(repair).await {
                Ok(done) => say(&format!("fixed {}: {done}", line.id))?,
                Err(error) => say(&format!("not fixed {}: {error:#}", line.id))?,
            }
        }
    }
    if !any {
        say(match report.exit_status() {
            0 => "there is nothing to repair",
            _ => "nothing can be repaired automatically; each finding says what to type",
        })?;
    }
    Ok(any)
}

async fn one(repair: &Repair) -> anyhow::Result<String> {
    match repair {
        Repair::Directory { path } => {
            std::fs::create_dir_all(path).with_context(|| format!("{path} cannot be created"))?;
            Ok(format!("{path} created"))
        }
        Repair::Link { path, target } => {
            let path = Path::new(path);
            // Replace only a wrong link; anything else was put there on purpose.
            if path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink()) {
                std::fs::remove_file(path).with_context(|| format!("{} cannot be removed", path.display()))?;
            }
            if let Some(directory) = path.parent() {
                std::fs::create_dir_all(directory).with_context(|| format!("{} cannot be created", directory.display()))?;
            }
            std::os::unix::fs::symlink(target, path).with_context(|| format!("{} cannot be created", path.display()))?;
            Ok(format!("{} → {target} created", path.display()))
        }
        Repair::Spec {
            path,
            vendor,
            driver_root,
        } => {
            let cli = Cli::try_parse_from([
                "divvy",
                "cdi",
                "generate",
                "--vendor",
                vendor,
                "--driver-root",
                driver_root,
                "-o",
                path,
            ])?;
            let DivvyCommand::Cdi(command @ CdiCommand::Generate(_)) = cli.command else {
                anyhow::bail!("this command line does not run divvy cdi generate; please report this as a bug");
            };
            Box::pin(crate::commands::cdi::run(command)).await?;
            Ok(format!("{path} generated again"))
        }
    }
}
