//! What NVML answers: to an unprivileged user, and about the utilization of processes.
//!
//! nvml.h does not say what `nvmlDeviceGetProcessUtilization` returns if several processes ran within one sample. So the raw samples are in the report,
//! next to what the programs really did.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::bench::GpuCheckBench;
use crate::findings::GpuCheckFindings;
use crate::program::CheckProgram;

/// How long samples are taken, and how often NVML is asked.
const MS: u64 = 5000;
const EVERY_MS: u64 = 20;
/// The length of a kernel.
const KERNEL_NS: u64 = 1_000_000;
const PERIOD_MS: u64 = 50;
/// The user `nobody`, for an unprivileged program.
const NOBODY: u32 = 65534;

pub(super) async fn run(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    calls(bench, findings).await?;
    samples(bench, findings).await
}

async fn calls(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let own = rustix::process::getuid().as_raw();
    let mut answers = vec![(own, ask(bench, None).await)];
    if own == 0 {
        answers.push((NOBODY, ask(bench, Some(NOBODY)).await));
    }
    let mut by_call: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for (uid, answer) in answers {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => {
                findings.skip(format!("calls as uid {uid}: {error:#}"));
                continue;
            }
        };
        for call in answer.as_array().context("a list of calls")? {
            let text = format!("uid {uid}: {}", call["text"].as_str().unwrap_or_default());
            by_call.entry(call["name"].to_string()).or_default().push(text);
            // What Divvy needs as root.
            let is_needed =
                call["name"] == "nvmlDeviceGetMemoryInfo_v2" || call["name"] == "nvmlDeviceGetComputeRunningProcesses";
            findings.expect(call["ok"] == true || !is_needed || uid == NOBODY, || format!("{call}"));
        }
    }
    for (call, texts) in by_call {
        findings.value(call.trim_matches('"'), texts.join("; "));
    }
    Ok(())
}

async fn ask(bench: &GpuCheckBench, uid: Option<u32>) -> Result<Value> {
    let mut command = bench.pack.command("divvy-cuda-program")?;
    command
        .arg(&bench.driver.cuda)
        .envs(bench.driver.environment.iter().map(|(name, value)| (name, value)));
    if let Some(uid) = uid {
        command.uid(uid).gid(uid);
    }
    let mut program = CheckProgram::start(command)?;
    program.ask(&format!("nvml {}", bench.driver.nvml.display())).await?;
    program.ask(&format!("nvml-calls {}", bench.driver.gpu().uuid)).await
}

async fn samples(bench: &mut GpuCheckBench, findings: &mut GpuCheckFindings) -> Result<()> {
    let rounds = {
        let mut program = bench.without_guard().await?;
        program.number(&format!("calibrate {KERNEL_NS}"), "rounds").await?
    };
    for (what, busy) in [
        ("one process, busy half of the time", &[25][..]),
        ("two processes, busy a quarter and half of the time", &[12, 25]),
        ("two processes, always busy", &[50, 50]),
    ] {
        let mut programs = Vec::new();
        for _ in busy {
            let mut program = bench.without_guard().await?;
            program.ask(&format!("kernel {KERNEL_NS} {rounds}")).await?;
            programs.push(program);
        }
        let pids: Vec<u32> = programs.iter().map(CheckProgram::pid).collect();
        let mut watcher = bench.nvml().await?;
        let work = programs.iter_mut().zip(busy).map(|(program, busy)| {
            let request = format!("pulse {busy} {PERIOD_MS} {MS}");
            async move { program.ask(&request).await }
        });
        let uuid = &bench.driver.gpu().uuid;
        let request = format!("nvml-samples {uuid} {EVERY_MS} {MS}");
        let (done, answers) = futures::join!(futures::future::try_join_all(work), watcher.ask(&request));
        done?;
        let answers = answers?;
        findings.value(what, summary(&answers, &pids));
        findings.raw.insert(what.to_owned(), answers);
    }
    Ok(())
}

/// Return what the samples say in short.
fn summary(answers: &Value, pids: &[u32]) -> String {
    let mut times: BTreeMap<u64, BTreeSet<u64>> = BTreeMap::new();
    let (mut lags, mut sums): (Vec<u64>, BTreeMap<u64, (u64, u64)>) = (Vec::new(), BTreeMap::new());
    for answer in answers.as_array().into_iter().flatten() {
        if let Some(error) = answer["error"].as_str() {
            return format!("NVML refuses: {error}");
        }
        let asked = answer["asked"].as_u64().unwrap_or_default();
        for sample in answer["samples"].as_array().into_iter().flatten() {
            let number = |index: usize| sample[index].as_u64().unwrap_or_default();
            let (pid, at, percent) = (number(0), number(1), number(2));
            times.entry(at).or_default().insert(pid);
            lags.push(asked.saturating_sub(at) / 1000);
            let sum = sums.entry(pid).or_default();
            *sum = (sum.0 + percent, sum.1 + 1);
        }
    }
    let list: Vec<u64> = times.keys().copied().collect();
    let gaps: Vec<u64> = list.windows(2).map(|pair| (pair[1] - pair[0]) / 1000).collect();
    let together = times.values().filter(|pids| pids.len() > 1).count();
    let means = sums.iter().map(|(pid, (sum, count))| {
        let whose = pids.iter().position(|own| u64::from(*own) == *pid);
        let whose = whose.map_or_else(
            || format!("another process ({pid})"),
            |index| format!("process {}", index + 1),
        );
        format!("{whose}: {count} samples, {} % on average", sum / count.max(&1))
    });
    format!(
        "{} times, {together} of them with several processes; {} ms between them (median), {} ms from a sample to the answer (median); {}",
        times.len(),
        median(gaps),
        median(lags),
        means.collect::<Vec<_>>().join("; ")
    )
}

fn median(mut numbers: Vec<u64>) -> u64 {
    numbers.sort_unstable();
    numbers.get(numbers.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_summary_has_the_samples_of_each_process_and_their_times() {
        let answers = json!([
            {"asked": 1_050_000, "samples": [[7, 1_000_000, 40, 0], [8, 1_000_000, 20, 0]], "error": null},
            {"asked": 1_250_000, "samples": [[7, 1_200_000, 60, 0]], "error": null},
        ]);
        let expected = "2 times, 1 of them with several processes; 200 ms between them (median), 50 ms from a sample to the answer (median); \
                        process 1: 2 samples, 50 % on average; another process (8): 1 samples, 20 % on average";
        assert_eq!(summary(&answers, &[7]), expected);
        let refused = json!([{"asked": 1, "samples": [], "error": "no permission"}]);
        assert_eq!(summary(&refused, &[7]), "NVML refuses: no permission");
    }
}
