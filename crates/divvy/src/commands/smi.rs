//! `divvy smi`: asks the probe, and prints nvidia-smi's table with the pods of the processes.

pub(super) mod grants;
mod value;

use std::path::{Path, PathBuf};

use divvy_hardware::client::{ProbeClient, ProbeSource, ProbeTiming, Spawn, Update};
use divvy_hardware::{Failure, FailureCode, GpuGauges, GpuProcesses, Snapshot};
use divvy_model::Vendor;

use super::{probe, say};
use crate::cli::smi::{MachineArgs, SmiArgs, SmiOutput};
use crate::printer;

/// What the probe answered.
struct ProbeAnswers {
    snapshot: Snapshot,
    gauges: Vec<GpuGauges>,
    processes: Vec<GpuProcesses>,
}

/// The exit status of nvidia-smi if the driver gives a handle of no GPU (`NVML_ERROR_GPU_IS_LOST`).
const LOST: u8 = 15;

/// Print the table, and return the exit status.
pub async fn run(args: SmiArgs) -> anyhow::Result<u8> {
    // The directory of a started probe's socket and log. It is removed at the end.
    let directory = tempfile::tempdir()?;
    let asked = tokio::time::timeout(probe::PATIENCE, ask(which(&args.machine, directory.path())?)).await;
    let answers = asked
        .unwrap_or_else(|_| {
            let text = format!("the driver has not answered for {} s", probe::PATIENCE.as_secs());
            Err(Failure::new(FailureCode::Timeout, text))
        })
        .map_err(unread)?;
    if answers.snapshot.gpus.is_empty() && answers.snapshot.unreadable.is_empty() {
        anyhow::bail!("the driver lists no NVIDIA GPU; type divvy doctor to find the cause");
    }
    for gpu in &answers.processes {
        if let Some(error) = &gpu.error {
            say(&format!("note: the processes of {} could not be listed: {error}", gpu.uuid))?;
        }
    }
    let is_in_pod = |gpu: &GpuProcesses| gpu.processes.iter().any(|process| process.pod.is_some());
    let (pods, troubles) = if answers.processes.iter().any(is_in_pod) {
        grants::read(&args.machine.state_dir)
    } else {
        Default::default()
    };
    for trouble in troubles {
        say(&format!("note: {trouble}"))?;
    }
    let time = jiff::Zoned::now().strftime("%a %b %e %H:%M:%S %Y").to_string();
    let smi = value::of(time, &answers, &pods);
    match args.output {
        Some(SmiOutput::Json) => printer::json(&smi)?,
        None => printer::print(&divvy_smi::table(&smi))?,
    }
    Ok(if smi.is_without_handles() { LOST } else { 0 })
}

/// Return the probe to ask: the one that `--probe` names, otherwise the one that runs for the agent, otherwise one to start.
pub(super) fn which(args: &MachineArgs, directory: &Path) -> anyhow::Result<ProbeSource> {
    let running = args.state_dir.join("probe/probe.sock");
    if args.probe.is_none() && running.exists() {
        return Ok(ProbeSource::Socket(running));
    }
    let not_root = |root: &PathBuf| Some(root.clone()).filter(|root| root != Path::new("/"));
    probe::named(args.probe.as_deref(), |program| Spawn {
        program,
        nvml_library: args.nvml_library.clone(),
        driver_root: not_root(&args.driver_root),
        sys_root: not_root(&args.sys_root),
        share_files: None,
        watchdog: None,
        env: Vec::new(),
        dir: directory.to_owned(),
        // This program prints the probe's error itself, so the probe must not print it too.
        log: Some(directory.join("probe.log")),
    })
}

async fn ask(probe: ProbeSource) -> Result<ProbeAnswers, Failure> {
    let mut client = ProbeClient::start(probe, ProbeTiming::default());
    let snapshot = loop {
        match client.next().await {
            Some(Update::Snapshot(snapshot)) => break snapshot.only(Vendor::Nvidia),
            Some(Update::Fault(_)) => {}
            Some(Update::Unavailable(failure)) => return Err(failure),
            None => return Err(Failure::new(FailureCode::ProbeUnreachable, "the probe's client has ended")),
        }
    };
    let handle = client.handle();
    Ok(ProbeAnswers {
        snapshot,
        gauges: handle.metrics().await?,
        processes: handle.processes().await?,
    })
}

pub(super) fn unread(Failure { code, text }: Failure) -> anyhow::Error {
    let hint = match code {
        FailureCode::ProbeUnreachable => "give the path of divvy-probe with --probe",
        FailureCode::Protocol => {
            "the probe may be of another version than this program; give the path of one of this version with --probe"
        }
        _ => "type divvy doctor to find the cause",
    };
    anyhow::anyhow!("the GPUs could not be read: {text}; {hint}")
}
