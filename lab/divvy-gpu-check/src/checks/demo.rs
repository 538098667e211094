//! `divvy demo --scenario isolation --gpus real`: the whole way from a pod to a container on this GPU.

use anyhow::Result;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let divvy = match bench.pack.file("divvy") {
        Ok(path) => path,
        Err(error) => {
            findings.skip(error.to_string());
            return Ok(());
        }
    };
    if !bench.pack.is_native() {
        findings.skip("the demo starts its programs with the machine's C library, which is too old");
        return Ok(());
    }
    let check = bench.pack.command("divvy-contain")?.arg("--check").output().await?;
    if !check.status.success() {
        findings.skip(String::from_utf8_lossy(&check.stderr).trim());
        return Ok(());
    }
    let program = bench.without_guard().await?;
    let is_listed = bench.memory().await?.has(program.pid());
    program.end().await?;
    if !is_listed {
        findings.skip("NVML reports PIDs of another namespace, so the demo cannot see what its programs have");
        return Ok(());
    }
    let mut command = tokio::process::Command::new(divvy);
    command.args(["demo", "--scenario", "isolation", "--fast", "--gpus", "real", "--driver"]);
    command.arg(bench.driver_links()?);
    // Not the choice of one GPU, which the containers of the demo have on their own.
    let environment = bench
        .driver
        .environment
        .iter()
        .filter(|(name, _)| *name != "CUDA_VISIBLE_DEVICES");
    command
        .envs(environment.map(|(name, value)| (name, value)))
        .kill_on_drop(true);
    let output = command.output().await?;
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().rev().find(|line| !line.trim().is_empty()).unwrap_or_default();
    findings.value("divvy demo --scenario isolation", last.trim());
    findings.raw.insert("output".to_owned(), text.clone().into());
    findings.expect(output.status.success(), || {
        format!(
            "{}: {last}; {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        )
    });
    Ok(())
}
