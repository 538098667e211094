//! Shares of compute time.
//!
//! What a pod gets is its work: the launches that it finished, of those that keep the GPU busy all the time.

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::{CheckProgram, of};

/// A way to use the GPU: its name, the mode, the length of a kernel, and how many are launched before the program waits.
const WORK: [(&str, &str, u64, u64); 3] = [
    ("long kernels", "kernels", 10_000_000, 4),
    ("many short kernels", "kernels", 100_000, 40),
    ("launches of a graph", "graph", 100_000, 40),
];
const SHARES: [&[u32]; 2] = [&[25, 75], &[30, 30, 40]];
/// What is measured begins after this time: until the first measurement, a pod may have more than its rate, and pays for it afterwards.
const WARM_UP_MS: u64 = 3000;
const ALONE_MS: u64 = 1500;
/// A program alone keeps the GPU busy all the time if it gets at least this part of it, by the length of its kernels. If it does not, it waits for its CPU.
const BUSY: f64 = 0.9;
/// How far a share may be from what the pod's allocation says.
const POINTS: f64 = 5.0;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let length = bench.seconds * 1000;
    for (what, mode, ns, at_once) in WORK {
        let mut program = bench.without_guard().await?;
        let rounds = program.number(&format!("calibrate {ns}"), "rounds").await?;
        let load = format!("kernel {ns} {rounds}");
        program.ask(&load).await?;
        let request = |warm_up: u64, length: u64| format!("work {mode} {at_once} {warm_up} {length}");
        let alone = rate(&program.ask(&request(500, ALONE_MS)).await?)?;
        program.end().await?;
        findings.value(
            format!("{what}, one program alone"),
            format!("{alone:.0} kernels in a second, each {} µs", ns / 1000),
        );
        let most = 1e9 / ns as f64;
        let whole = if alone >= BUSY * most { alone } else { most };
        for shares in SHARES {
            let without = unlimited(bench, shares.len(), &load, &request(500, length / 4)).await?;

            let (mut pods, mut programs) = (Vec::new(), Vec::new());
            for percent in shares {
                pods.push(bench.pod(4, *percent).await?);
            }
            for pod in &pods {
                let is_measured = bench
                    .rig()
                    .await?
                    .wait("the first measurement of the GPU's utilization", |_| {
                        pod.limits().is_ok_and(|limits| limits.account.at > 0).then_some(())
                    });
                is_measured.await?;
                programs.push(bench.with_guard(pod).await?);
            }
            GpuCheckBench::all(&mut programs, &load).await?;
            let with = GpuCheckBench::all(&mut programs, &request(WARM_UP_MS, length)).await?;
            let (with, without) = (of_all(&with, whole)?, of_all(&without, whole)?);
            findings.both(format!("{what}, {}", list(shares)), texts(&with), texts(&without));
            let after = if bench.driver.simulated {
                of_all(
                    &unlimited(bench, shares.len(), &load, &request(500, length / 4)).await?,
                    whole,
                )?
            } else {
                without.clone()
            };
            let together = without.iter().sum::<f64>().min(after.iter().sum());
            // A simulated GPU is as fast as the machine's CPU lets the programs be. A real one is always judged.
            if bench.driver.simulated && together < BUSY * 100.0 {
                findings.skip(format!(
                    "{what}, {}: without the guard, the programs keep the GPU busy {together:.0} % of the time, because they wait for a CPU",
                    list(shares)
                ));
                end(bench, pods, programs).await?;
                continue;
            }
            for (percent, got) in shares.iter().zip(&with) {
                findings.expect((got - f64::from(*percent)).abs() <= POINTS, || {
                    format!("{what}, {}: the pod with {percent} % got {got:.1} %", list(shares))
                });
            }
            end(bench, pods, programs).await?;
        }
    }
    Ok(())
}

/// Let programs work together without the guard.
async fn unlimited(bench: &GpuCheckBench, count: usize, load: &str, request: &str) -> Result<Vec<Value>> {
    let mut programs = Vec::new();
    for _ in 0..count {
        programs.push(bench.without_guard().await?);
    }
    GpuCheckBench::all(&mut programs, load).await?;
    let answers = GpuCheckBench::all(&mut programs, request).await?;
    for program in programs {
        program.end().await?;
    }
    Ok(answers)
}

async fn end(bench: &mut GpuCheckBench, pods: Vec<crate::rig::SharePod>, programs: Vec<CheckProgram>) -> Result<()> {
    for program in programs {
        program.end().await?;
    }
    for pod in pods {
        bench.rig().await?.delete(pod).await?;
    }
    Ok(())
}

/// Return the launches in a second.
fn rate(answer: &Value) -> Result<f64> {
    let (launches, ns) = (of(answer, "launches")?, of(answer, "ns")?);
    let seconds = ns as f64 / 1e9;
    (seconds > 0.0).then(|| launches as f64 / seconds).context("no time passed")
}

/// Return the share of each program, in percent.
fn of_all(answers: &[Value], whole: f64) -> Result<Vec<f64>> {
    answers.iter().map(|answer| Ok(rate(answer)? * 100.0 / whole)).collect()
}

fn texts(shares: &[f64]) -> String {
    let texts: Vec<String> = shares.iter().map(|share| format!("{share:.1}")).collect();
    format!("{} %", texts.join(" / "))
}

fn list(shares: &[u32]) -> String {
    let texts: Vec<String> = shares.iter().map(u32::to_string).collect();
    texts.join("/")
}
