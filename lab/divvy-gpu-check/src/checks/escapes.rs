//! A program loads the driver's own library by its path.

use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::time::timeout;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;

const GIB: u64 = 4;
/// The event about a program that avoids the guard.
const AVOIDED: &str = "GuardAvoided";
/// The agent needs three measurements, one each second.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let pod = bench.pod(GIB, 0).await?;
    let neighbor = bench.pod(GIB, 0).await?;
    let _held = bench.with_guard(&neighbor).await?;
    let real = pod.container.real_cuda();
    let mut program = bench.started(&pod, &real).await?;
    let answer = program.ask(&format!("allocate {}", GIB * 1024 + 512)).await?;
    findings.expect(answer["refused"].is_null(), || {
        format!("the driver's own library refuses what is more than the share: {answer}")
    });
    let rig = bench.rig().await?;
    let text = rig.wait("the event GuardAvoided", |rig| rig.event(&pod, AVOIDED)).await?;
    findings.value(AVOIDED, &text);
    let of_neighbor = bench.rig().await?.event(&neighbor, AVOIDED);
    findings.expect(of_neighbor.is_none(), || {
        format!("a pod whose program has the guard has the event: {of_neighbor:?}")
    });
    program.end().await?;
    bench.rig().await?.delete(pod).await?;

    // The agent names the process by NVML's PID. If that is not this namespace's, the probe must not be told to end it: it could be another process.
    let pod = bench.pod(GIB, 0).await?;
    let mut program = bench.started(&pod, &pod.container.real_cuda()).await?;
    if !bench.memory().await?.has(program.pid()) {
        findings.skip("--on-escape kill: NVML reports PIDs of another namespace");
        return Ok(());
    }
    bench.restart_agent(&["--on-escape", "kill"]).await?;
    let status = timeout(PATIENCE, program.ended()).await;
    let status = status.with_context(|| {
        format!("the program that avoids the guard runs {PATIENCE:?} after the start of an agent with --on-escape kill")
    })??;
    findings.value("with --on-escape kill", format!("the program ended with {status}"));
    findings.expect(status.contains("signal: 9"), || format!("the program ended with {status}"));
    Ok(())
}
