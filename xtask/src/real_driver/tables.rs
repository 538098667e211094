//! `divvy smi` beside nvidia-smi. Both read the same simulated driver.

use std::process::{Command, Output};

use anyhow::{Context as _, Result};

use super::container::{BenchContainer, LIBRARIES};
use super::packages::PackagedDriver;
use super::{CheckResult, DriverBench, differ};

/// Machines: a name, the GPUs as a description has them, and the state of the simulated driver (`MachineChanges` of divvy-nvml-sim).
const MACHINES: &str = include_str!("machines.txt");

pub(crate) fn check(bench: &DriverBench) -> Result<CheckResult> {
    let mut found = CheckResult::default();
    for driver in &bench.drivers {
        for machine in MACHINES.split("\n\n").filter(|machine| !machine.starts_with('#')) {
            let mut lines = machine.lines();
            let (name, state) = (lines.next().unwrap_or_default(), lines.next().unwrap_or("{}"));
            let gpus: String = lines.zip(0..).map(|(gpu, index)| described(gpu, index)).collect();
            let [theirs, ours] = both(bench, driver, &gpus, state)?;
            let name = format!("{} {name}", driver.branch);
            found.note(&name, theirs == ours);
            if theirs != ours {
                differ(bench, &name, [&theirs, &ours])?;
            }
        }
    }
    Ok(found)
}

fn described(gpu: &str, index: u32) -> String {
    let values: String = gpu.split("; ").map(|value| format!("{value}\n")).collect();
    format!("[[node.gpu]]\nuuid = \"GPU-{index:02x}010203-0405-4607-8809-0a0b0c0d0e0f\"\n{values}")
}

/// Return what nvidia-smi and `divvy smi` print about a machine, without the time, and with the exit status.
fn both(bench: &DriverBench, driver: &PackagedDriver, gpus: &str, state: &str) -> Result<[String; 2]> {
    let text = format!(
        "v = 1\n[[node]]\nname = \"n\"\naddress = \"10.0.0.1\"\ndriver = \"{}\"\n{gpus}",
        driver.version
    );
    let machine = bench.write("machine.toml", text)?;
    let control = bench.work.join("control");
    bench.write("control.state", format!("{{\"gpus\": {state}}}"))?;
    let simulator = bench.built("libdivvy_nvml_sim.so")?;
    let container = BenchContainer::new(bench).mount(&simulator, format!("{LIBRARIES}/libnvidia-ml.so.1"));
    let container = container
        .set("DIVVY_NVML_SIM", machine.clone())
        .set("DIVVY_NVML_SIM_CONTROL", control.clone());
    let theirs = container.run(&driver.smi, &[])?;
    let mut ours = Command::new(bench.built("divvy")?);
    ours.arg("smi")
        .arg("--nvml-library")
        .arg(&simulator)
        .arg("--state-dir")
        .arg(bench.work.join("no-agent"));
    ours.env("DIVVY_NVML_SIM", machine).env("DIVVY_NVML_SIM_CONTROL", control);
    let ours = ours.output().context("divvy could not be started")?;
    Ok([theirs, ours].map(|output| said(&output)))
}

fn said(output: &Output) -> String {
    let text = [&output.stdout[..], &output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    let days = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
    let is_time = |line: &str| days.iter().any(|day| line.starts_with(day)) && line.matches(':').count() == 2;
    let lines: String = text
        .lines()
        .filter(|line| !is_time(line))
        .map(|line| format!("{line}\n"))
        .collect();
    format!("{lines}status {}\n", output.status.code().unwrap_or(-1))
}
