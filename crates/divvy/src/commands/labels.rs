//! `divvy labels`: prints the labels that describe this machine's GPUs, and writes them to its node.

use std::path::{Path, PathBuf};

use divvy_agent::MigStrategyArg;
use divvy_agent::labels::{DescribedHost, NodeLabels, plain_labels};
use divvy_hardware::client::{Spawn, snapshot};
use divvy_hardware::{Failure, FailureCode, Snapshot};
use divvy_kube::client::connect;
use divvy_labels::file;

use super::{inspect, probe, say};
use crate::cli::labels::{LabelsArgs, LabelsOutput};
use crate::printer;

/// Print the labels; with `--apply`, write them first.
pub async fn run(args: LabelsArgs) -> anyhow::Result<()> {
    let machine = DescribedHost::of_machine(Path::new("/")).machine(ask(&args).await?, 0);
    let labels = plain_labels(&machine, MigStrategyArg::Mixed)?;
    for warning in &labels.warnings {
        say(&format!("note: {warning}"))?;
    }
    if let Some(node) = args.node.as_deref().filter(|_| args.apply) {
        let client = connect(&inspect::choice(&args.cluster)).await?.client;
        for sentence in NodeLabels::new(client, node).write(&labels).await? {
            say(&format!("warning: {sentence}"))?;
        }
        say(&format!("note: the labels of node {node} were written"))?;
    }
    match args.output {
        Some(LabelsOutput::Json) => printer::json(&labels.labels)?,
        None => printer::print(&file(&labels))?,
    }
    Ok(())
}

async fn ask(args: &LabelsArgs) -> anyhow::Result<Snapshot> {
    let spawn = |program: PathBuf| Spawn {
        program,
        nvml_library: args.nvml_library.clone(),
        driver_root: Some(args.driver_root.clone()).filter(|root| root != Path::new("/")),
        sys_root: None,
        share_files: None,
        watchdog: None,
        env: Vec::new(),
        dir: PathBuf::new(),
        log: None,
    };
    let asked = snapshot(&probe::named(args.probe.as_deref(), spawn)?, probe::PATIENCE).await;
    asked.map_err(|Failure { code, text }| {
        let hint = match code {
            FailureCode::ProbeUnreachable => "give the path of divvy-probe with --probe",
            _ => "type divvy doctor to find the cause",
        };
        anyhow::anyhow!("the driver could not be queried for its GPUs, so there are no labels: {text}; {hint}")
    })
}
