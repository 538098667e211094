//! Processes fill the share of their pod.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use tokio::time::sleep;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::{CheckProgram, of};
use crate::rig::SharePod;

const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";
/// How long the agent may take to measure a context: it measures each second, and needs several measurements.
const PATIENCE: Duration = Duration::from_secs(15);

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let gib = bench.large_share();
    let context = context(bench, findings, gib).await?;
    alone(bench, findings).await?;
    for count in [1, 4, 16] {
        let before = bench.memory().await?.used;
        let pod = bench.pod(gib, 0).await?;
        let mut programs = bench.several(&pod, count).await?;
        let answers = GpuCheckBench::all(&mut programs, "fill").await?;
        let memory = bench.memory().await?;
        let held = memory.used.saturating_sub(before);
        let listed: u64 = programs.iter().filter_map(|program| memory.of(program.pid())).sum();
        findings.both(
            format!("{count} at once fill a share of {} MiB", pod.bytes >> 20),
            format!(
                "the GPU has given {} MiB, of which {} MiB are listed for processes; the agent adds {} MiB to what was allocated",
                held >> 20,
                listed >> 20,
                pod.limits()?.overhead >> 20
            ),
            "",
        );
        // The driver's memory of a GPU that belongs to no process may grow, too, so the lists decide if there are any.
        let given = if listed > 0 { listed } else { held };
        findings.expect(given <= pod.bytes + context, || {
            format!(
                "{count} processes have {} MiB, and their pod's share is {} MiB, and a context takes {} MiB",
                given >> 20,
                pod.bytes >> 20,
                context >> 20
            )
        });
        for answer in &answers {
            findings.expect(answer["refused"]["error"] == OUT_OF_MEMORY, || {
                format!("a refusal is {}", answer["refused"])
            });
        }
        end(bench, pod, programs, before).await?;
    }
    Ok(())
}

/// Find what a context takes, and let the agent learn it.
async fn context(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings, gib: u64) -> Result<u64> {
    let before = bench.memory().await?.used;
    let pod = bench.pod(gib, 0).await?;
    let mut program = bench.with_guard(&pod).await?;
    let memory = bench.memory().await?;
    let held = memory.of(program.pid()).unwrap_or(memory.used.saturating_sub(before));
    let charged = pod.limits()?.context;
    program.ask("allocate 2").await?;
    let began = Instant::now();
    let learned = loop {
        let limits = pod.limits()?;
        if limits.overhead > 0 || limits.context != charged {
            break limits.context + limits.overhead;
        }
        if began.elapsed() > PATIENCE {
            bail!(
                "the agent has not measured a context of {} MiB in {PATIENCE:?}; the driver lists {:?}",
                held >> 20,
                memory.processes
            );
        }
        sleep(Duration::from_millis(100)).await;
    };
    findings.value(
        "a context",
        format!(
            "the driver gives {} MiB; the agent has measured {} MiB in {:.1} s",
            held >> 20,
            learned >> 20,
            began.elapsed().as_secs_f64()
        ),
    );
    let answer = program.ask("memory").await?;
    let total = of(&answer, "total_mib")?;
    findings.value(
        "cuMemGetInfo with the guard",
        format!("{total} MiB in all, {} MiB free", of(&answer, "free_mib")?),
    );
    findings.expect(total == pod.bytes >> 20, || {
        format!("cuMemGetInfo says {total} MiB, and the share is {} MiB", pod.bytes >> 20)
    });
    let (mut view, nvml) = (
        pod.program(&bench.pack, &bench.driver, &pod.container.cuda())?,
        pod.container.nvml(),
    );
    view.ask(&format!("nvml {}", nvml.display())).await?;
    let seen = view.ask(&format!("nvml-state {}", bench.driver.gpu().uuid)).await?;
    let total = of(&seen, "total")?;
    findings.value(
        "NVML with the guard",
        format!(
            "{} MiB in all, {} MiB used, processes {}",
            total >> 20,
            of(&seen, "used")? >> 20,
            seen["processes"]
        ),
    );
    findings.expect(total == pod.bytes, || {
        format!("NVML says {total} bytes, and the share is {} bytes", pod.bytes)
    });
    // The agent believes what it has measured twice in a row.
    sleep(Duration::from_secs(3)).await;
    view.end().await?;
    end(bench, pod, vec![program], before).await?;
    let next = bench.pod(gib, 0).await?;
    let reserved = next.limits()?.context;
    findings.value(
        "what the next pod reserves for each context",
        format!("{} MiB", reserved >> 20),
    );
    findings.expect(reserved >= held, || {
        format!(
            "a context takes {} MiB, and a pod that was not measured yet is charged with {} MiB: processes that take all memory at their start exceed the share",
            held >> 20,
            reserved >> 20
        )
    });
    bench.rig().await?.delete(next).await?;
    Ok(held)
}

/// What one process gets without the guard.
async fn alone(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let before = bench.memory().await?.used;
    let mut program = bench.without_guard().await?;
    let answer = program.ask("fill").await?;
    let text = format!("{} MiB, then {}", of(&answer, "allocated_mib")?, answer["refused"]["error"]);
    findings.both("1 alone", "", text);
    program.end().await?;
    bench.settle(before).await
}

async fn end(bench: &mut GpuCheckBench, pod: SharePod, programs: Vec<CheckProgram>, before: u64) -> Result<()> {
    for program in programs {
        program.end().await?;
    }
    bench.rig().await?.delete(pod).await?;
    bench.settle(before).await
}
