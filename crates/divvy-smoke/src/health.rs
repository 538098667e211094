//! S08: what the probe says about the GPU.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use divvy_smoke_report::{Gpu, Id};
use serde::Deserialize;

use crate::steps::{Done, Outcome, Problem};

/// The most that is read of the probe's answer, in bytes.
const MOST: u64 = 4 << 20;

/// The parts of the probe's snapshot that say something about health. Their names are those of `divvy-probe --once`.
#[derive(Deserialize)]
struct Snapshot {
    gpus: Vec<Facts>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Facts {
    uuid: String,
    #[serde(default)]
    temperature: Option<u32>,
    #[serde(default)]
    lost: bool,
    #[serde(default)]
    error: Option<String>,
    #[serde(default)]
    mig_devices: Vec<Mig>,
    #[serde(default)]
    no_events: Option<NoEvents>,
}

#[derive(Deserialize)]
struct Mig {
    uuid: String,
}

#[derive(Deserialize)]
struct NoEvents {
    error: String,
}

/// Judge the probe's answer.
pub(crate) fn judge(answer: &str, gpu: &Gpu) -> Outcome {
    let snapshot: Snapshot = serde_json::from_slice(answer.as_bytes())
        .map_err(|error| Problem::Skip(format!("divvy-probe gave no snapshot: {error}")))?;
    let is_it = |facts: &&Facts| facts.uuid == gpu.uuid || facts.mig_devices.iter().any(|mig| mig.uuid == gpu.uuid);
    let facts = snapshot.gpus.iter().find(is_it);
    let facts = facts.ok_or_else(|| Problem::Skip(format!("divvy-probe does not list {}", gpu.uuid)))?;
    let sick = |found: String| {
        Problem::finding(
            found,
            "the GPU may fail at any time, even if all results were right so far",
            "drain the GPU; look for an XID in the node's kernel log (dmesg | grep NVRM)",
        )
    };
    if facts.lost {
        return Err(sick("the driver reports the GPU as lost".to_owned()));
    }
    if let Some(error) = &facts.error {
        return Err(sick(format!("the driver cannot describe the GPU: {error}")));
    }
    let temperature = facts.temperature.map(|degrees| format!(", {degrees} °C")).unwrap_or_default();
    let warning = facts.no_events.as_ref().map(|no_events| {
        crate::codes::Finding::new(
            format!("the driver's events do not arrive: {}", no_events.error),
            "an XID of this GPU is not noticed",
            "divvy doctor --node has the details",
        )
    });
    Ok(Done {
        warning,
        ..Done::new(format!("the driver answers and reports no error{temperature}"), 0)
    })
}

/// Return the probe in the directory of this program.
pub(crate) fn find(program: &Path) -> Option<PathBuf> {
    let beside = program.with_file_name("divvy-probe");
    beside.exists().then_some(beside)
}

/// Ask the probe, for at most so long.
pub(crate) fn ask(probe: Option<&Path>, gpu: Option<&Gpu>, most: Duration) -> Outcome {
    let skip = |reason: String| Problem::Skip(reason);
    let gpu = gpu.ok_or_else(|| skip(format!("no GPU was found in {}", Id::S01.word())))?;
    let probe = probe.ok_or_else(|| skip("divvy-probe is not in the directory of this program".to_owned()))?;
    if most.is_zero() {
        return Err(skip("no time was left".to_owned()));
    }
    let spawned = Command::new(probe)
        .args(["--once", "--watchdog", "5"])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    let mut child = spawned.map_err(|error| skip(format!("divvy-probe could not be started: {error}")))?;
    let (Some(output), Some(errors)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(skip("divvy-probe has no output".to_owned()));
    };
    let (said, heard) = mpsc::channel();
    std::thread::spawn(move || {
        let (mut answer, mut reason) = (String::new(), String::new());
        let read = output
            .take(MOST)
            .read_to_string(&mut answer)
            .and_then(|_| errors.take(4096).read_to_string(&mut reason));
        // It is no longer awaited if it took too long.
        let _ = said.send(read.map(|_| (answer, reason)));
    });
    match heard.recv_timeout(most) {
        Ok(Ok((answer, reason))) => {
            let ended = child.wait().map_err(|error| skip(format!("divvy-probe: {error}")))?;
            match ended.success() {
                true => judge(&answer, gpu),
                false => {
                    let reason = reason
                        .lines()
                        .last()
                        .unwrap_or_default()
                        .trim_start_matches("divvy-probe: ")
                        .to_owned();
                    Err(skip(format!("divvy-probe finds nothing here: {reason}")))
                }
            }
        }
        Ok(Err(error)) => Err(skip(format!("divvy-probe gave no snapshot: {error}"))),
        Err(_) => {
            let _ = child.kill();
            Err(Problem::finding(
                "divvy-probe did not answer in time",
                "the driver hangs, so nothing on the node can query its GPUs",
                "nvidia-smi -L shows whether the driver answers other programs; reboot the node if it does not",
            ))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_probes_answer_is_judged() {
        let gpu = Gpu {
            uuid: "GPU-1".to_owned(),
            ..Gpu::default()
        };
        for (gpus, expected) in [
            (
                r#"{"uuid":"GPU-1","temperature":40}"#,
                "PASS the driver answers and reports no error, 40 °C",
            ),
            (
                r#"{"uuid":"GPU-0","migDevices":[{"uuid":"GPU-1"}]}"#,
                "PASS the driver answers and reports no error",
            ),
            (r#"{"uuid":"GPU-2"}"#, "SKIP divvy-probe does not list GPU-1"),
            (r#"{"uuid":"GPU-1","lost":true}"#, "FAIL the driver reports the GPU as lost"),
            (
                r#"{"uuid":"GPU-1","error":"x"}"#,
                "FAIL the driver cannot describe the GPU: x",
            ),
            (
                r#"{"uuid":"GPU-1","noEvents":{"error":"y","ms":1}}"#,
                "WARN the driver's events do not arrive: y; the driver answers and reports no error",
            ),
            (r#""#, "SKIP divvy-probe does not list GPU-1"),
            (r#"{"uuid":1}"#, "SKIP divvy-probe gave no snapshot"),
        ] {
            let step = crate::run::result(Id::S08, judge(&format!("{{\"gpus\":[{gpus}]}}"), &gpu));
            assert!(
                format!("{} {}", step.status.word(), step.found).starts_with(expected),
                "{step:?}"
            );
        }
    }

    #[test]
    fn a_step_without_a_probe_a_gpu_or_time_is_skipped_with_the_reason() {
        let gpu = Gpu::default();
        let (probe, second) = (Path::new("/nonexistent/divvy-probe"), Duration::from_secs(1));
        for (outcome, part) in [
            (ask(None, Some(&gpu), second), "not in the directory"),
            (ask(Some(probe), None, second), "no GPU was found in S01"),
            (ask(Some(probe), Some(&gpu), Duration::ZERO), "no time was left"),
            (ask(Some(probe), Some(&gpu), second), "could not be started"),
        ] {
            assert!(
                matches!(&outcome, Err(Problem::Skip(reason)) if reason.contains(part)),
                "{outcome:?}"
            );
        }
    }
}
