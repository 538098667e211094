//! S08: what the probe says about the GPU before the first step that uses it and after the last one, and the errors that the driver reports in between.

mod judge;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use divvy_smoke_report::{StepId, TestedGpu};
use rustix::io::pread;

use crate::codes::StepFinding;
use crate::lines;
use crate::page;
use crate::run::Message;
use crate::steps::{StepOutcome, StepProblem};
use judge::Heard;

/// The time that the probe has at the end, even if the steps have taken all of the time. Together with the time that a killed child has
/// ([`crate::supervise`]), it is less than the two seconds by which a run may be longer.
const GRACE: Duration = Duration::from_millis(500);
/// The exit status of a probe in which a call of the driver hung.
const HUNG: i32 = 70;

/// Return the probe in the directory of this program.
pub(crate) fn find(program: &Path) -> Option<PathBuf> {
    let beside = program.with_file_name("divvy-probe");
    beside.exists().then_some(beside)
}

/// The reason why the step is skipped without a GPU.
pub(crate) fn no_gpu() -> StepProblem {
    StepProblem::Skip(format!("no GPU was found in {}", StepId::S01.word()))
}

/// The probe, which runs while the steps do; or why it does not run.
pub(crate) struct HealthWatch(Result<RunningProbe, NoProbe>);

/// Why the probe does not run.
#[derive(Debug, thiserror::Error)]
enum NoProbe {
    #[error("divvy-probe is not in the directory of this program")]
    Missing,
    #[error("divvy-probe could not be started: {0}")]
    NotStarted(#[from] std::io::Error),
    #[error("divvy-probe has no output")]
    NoOutput,
}

struct RunningProbe {
    child: Child,
    /// The lines that it prints.
    lines: Receiver<Message>,
    /// A file in memory with what it says to standard error.
    said: Option<OwnedFd>,
    heard: Heard,
    /// Why a line could not be read.
    malformed: Option<String>,
}

impl HealthWatch {
    /// Start the probe, and wait for the state before the run for at most so long. If it comes later, it is read later.
    pub(crate) fn start(probe: Option<&Path>, most: Duration) -> HealthWatch {
        let probe = probe.ok_or(NoProbe::Missing);
        let mut watch = HealthWatch(probe.and_then(RunningProbe::start));
        if let Ok(probe) = &mut watch.0 {
            probe.listen(Instant::now() + most, |heard| heard.before.is_some());
        }
        watch
    }

    /// Ask for the state after the run, and judge what was heard. This waits for the time that is left, and [`GRACE`] at least.
    pub(crate) fn end(self, gpu: Option<&TestedGpu>, left: Duration) -> StepOutcome {
        let gpu = gpu.ok_or_else(no_gpu)?;
        let mut probe = self.0.map_err(|error| StepProblem::Skip(error.to_string()))?;
        let deadline = Instant::now() + left.max(GRACE);
        // At this end of file it reads the state again, and ends.
        drop(probe.child.stdin.take());
        let is_whole = probe.listen(deadline, |_| false);
        let status = if is_whole { probe.wait(deadline) } else { None };
        if let Some(error) = &probe.malformed {
            return Err(StepProblem::Skip(format!("divvy-probe gave no snapshot: {error}")));
        }
        let Some(status) = status else {
            return probe.late(gpu, left);
        };
        if status.success() {
            return probe.heard.judge(gpu);
        }
        let said = probe.said();
        let reason = said.lines().last().unwrap_or_default().trim_start_matches("divvy-probe: ");
        match (status.code(), &probe.heard.before) {
            (Some(HUNG), _) => Err(hangs(format!("divvy-probe has ended: {reason}"))),
            (Some(_), None) => Err(StepProblem::Skip(format!("divvy-probe finds nothing here: {reason}"))),
            (Some(_), Some(_)) => Err(StepProblem::Finding(StepFinding {
                gpu_at_fault: reason.ends_with("(gpu_lost)"),
                ..StepFinding::new(
                    format!("the driver answered before the run, and after it: {reason}"),
                    "nothing on the node can query its GPUs",
                    "nvidia-smi -L shows whether the driver answers other programs; look for an XID in the node's kernel log (dmesg | grep NVRM)",
                )
            })),
            (None, _) => Err(StepProblem::Skip(format!("divvy-probe was ended: {status}"))),
        }
    }
}

/// A driver that does not answer the probe.
fn hangs(found: String) -> StepProblem {
    StepProblem::Finding(StepFinding::of_gpu(
        found,
        "the driver hangs, so nothing on the node can query its GPUs",
        "nvidia-smi -L shows whether the driver answers other programs; reboot the node if it does not",
    ))
}

impl RunningProbe {
    fn start(program: &Path) -> Result<RunningProbe, NoProbe> {
        let said = page::make().ok();
        let mut command = Command::new(program);
        command.args(["--watch", "--watchdog", "5"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        match said.as_ref().map(OwnedFd::try_clone) {
            Some(Ok(said)) => command.stderr(said),
            _ => command.stderr(Stdio::null()),
        };
        let mut child = command.spawn()?;
        let output = child.stdout.take().ok_or(NoProbe::NoOutput)?;
        let message = |line: &[u8]| Some(Message::Line(String::from_utf8_lossy(line).into_owned()));
        Ok(RunningProbe {
            child,
            lines: lines::read(output, message),
            said,
            heard: Heard::default(),
            malformed: None,
        })
    }

    /// Return the beginning of what the probe said to standard error.
    fn said(&self) -> String {
        let mut bytes = [0; 4096];
        let read = self.said.as_ref().and_then(|said| pread(said, &mut bytes, 0).ok());
        String::from_utf8_lossy(&bytes[..read.unwrap_or(0)]).into_owned()
    }

    /// Take what the probe prints until a time, or until it is enough. Return whether the output has ended.
    fn listen(&mut self, until: Instant, is_enough: fn(&Heard) -> bool) -> bool {
        while !is_enough(&self.heard) {
            match self.lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(Message::Line(line)) => match serde_json::from_slice(line.as_bytes()) {
                    Ok(line) => self.heard.take(line),
                    Err(error) => self.malformed = Some(error.to_string()),
                },
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => return true,
                Err(RecvTimeoutError::Timeout) => return false,
            }
        }
        false
    }

    /// Wait for the end of the process until a time.
    fn wait(&mut self, until: Instant) -> Option<ExitStatus> {
        loop {
            match self.child.try_wait() {
                Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(5)),
                Ok(ended) => return ended,
                Err(_) => return None,
            }
        }
    }

    /// Judge what was heard of a probe that did not end in time.
    fn late(&self, gpu: &TestedGpu, left: Duration) -> StepOutcome {
        let judged = self.heard.before.is_some().then(|| self.heard.judge(gpu));
        match judged {
            Some(Err(StepProblem::Finding(finding))) => Err(StepProblem::Finding(finding)),
            _ if left >= GRACE => Err(hangs("divvy-probe did not answer in time".to_owned())),
            Some(Ok(done)) if done.warning.is_some() => Ok(done),
            _ => Err(StepProblem::Skip("no time was left".to_owned())),
        }
    }
}

impl Drop for RunningProbe {
    fn drop(&mut self) {
        // It fails only for a process that has ended. One that hangs in the kernel is not waited for.
        let _ = self.child.kill();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_without_a_probe_or_a_gpu_is_skipped_with_the_reason() {
        let gpu = TestedGpu::default();
        let (probe, second) = (Path::new("/nonexistent/divvy-probe"), Duration::from_secs(1));
        // Under an emulator, a program that does not exist starts and ends with status 127.
        let not_started = if divvy_skip::emulated("a program that does not exist is started there") {
            "finds nothing here"
        } else {
            "could not be started"
        };
        for (probe, gpu, part) in [
            (None, Some(&gpu), "not in the directory"),
            (Some(probe), None, "no GPU was found in S01"),
            (Some(probe), Some(&gpu), not_started),
        ] {
            let outcome = HealthWatch::start(probe, second).end(gpu, second);
            assert!(
                matches!(&outcome, Err(StepProblem::Skip(reason)) if reason.contains(part)),
                "{outcome:?}"
            );
        }
    }
}
