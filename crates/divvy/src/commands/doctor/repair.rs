//! `divvy doctor --fix`.

use std::path::Path;

use anyhow::Context as _;
use clap::Parser as _;
use divvy_doctor::{Repair, Report};

use super::{repairable, say};
use crate::cli::cdi::CdiCommand;
use crate::cli::{Cli, Command};

/// Does what can be done; whether there was anything to do. What fails is told, and the rest goes on.
pub(super) async fn all(report: &Report) -> anyhow::Result<bool> {
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
            0 => "nothing is to be put right",
            _ => "nothing here can be put right without a decision; what to type is with each finding",
        })?;
    }
    Ok(any)
}

async fn one(repair: &Repair) -> anyhow::Result<String> {
    match repair {
        Repair::Folder { path } => {
            std::fs::create_dir_all(path).with_context(|| format!("{path} cannot be made"))?;
            Ok(format!("{path} made"))
        }
        Repair::Link { path, target } => {
            let path = Path::new(path);
            // A wrong link goes; anything else stays, since somebody put it there.
            if path.symlink_metadata().is_ok_and(|metadata| metadata.is_symlink()) {
                std::fs::remove_file(path).with_context(|| format!("{} cannot be removed", path.display()))?;
            }
            if let Some(folder) = path.parent() {
                std::fs::create_dir_all(folder).with_context(|| format!("{} cannot be made", folder.display()))?;
            }
            std::os::unix::fs::symlink(target, path).with_context(|| format!("{} cannot be made", path.display()))?;
            Ok(format!("{} → {target} made", path.display()))
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
            let Command::Cdi(command @ CdiCommand::Generate(_)) = cli.command else {
                anyhow::bail!("divvy cdi generate is not what it was");
            };
            Box::pin(crate::commands::cdi::run(command)).await?;
            Ok(format!("{path} made again"))
        }
    }
}
