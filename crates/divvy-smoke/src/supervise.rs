//! The parent's part: it waits for the child until a deadline, and never indefinitely.

use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use divvy_smoke_report::{SmokeStep, StepId};

use crate::run::{Message, tests_gpu};

/// How long a killed child may take to end.
const LAST: Duration = Duration::from_secs(1);

/// The child, as its parent sees it.
pub trait SupervisedChild {
    /// Kill it. That has no effect while it is in the kernel and cannot be interrupted.
    fn kill(&mut self);
    /// Return how it ended, if it has: `None` inside for success.
    fn ended(&mut self) -> Option<Option<String>>;
    /// Return where in the kernel it is, for a child that does not end.
    fn place(&mut self) -> String;
    /// Return the step and the call of the driver that began last.
    fn call(&mut self) -> Option<(StepId, String)>;
}

/// Take the child's messages until it has ended, or the deadline is over. Return the steps that the child did not report.
pub fn supervise(
    messages: &Receiver<Message>,
    child: &mut dyn SupervisedChild,
    steps: &[StepId],
    timeout: Duration,
    began: Instant,
    tell: &mut dyn FnMut(Message),
) -> Vec<SmokeStep> {
    let deadline = began + timeout;
    let mut open: Vec<StepId> = steps.iter().copied().filter(|id| *id != StepId::S08).collect();
    let ended = loop {
        match messages.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(message) => {
                if let Message::Step(step) = &message {
                    open.retain(|id| *id != step.id);
                }
                tell(message);
            }
            // Nothing more comes, so the child ends, or is in the kernel on its way there.
            Err(RecvTimeoutError::Disconnected) => break wait(child, deadline),
            Err(RecvTimeoutError::Timeout) => break None,
        }
    };
    if open.is_empty() && ended == Some(None) {
        return Vec::new();
    }
    let (step, call) = child.call().unwrap_or((StepId::S01, "the start".to_owned()));
    // What was reported is not reported again: then the child hangs or crashes at its end.
    let step = if open.contains(&step) {
        step
    } else {
        open.first().copied().unwrap_or(step)
    };
    let failed = match ended {
        Some(how) => crashed(step, &call, how),
        None => hung(child, step, &call, timeout),
    };
    let rest = open.into_iter().filter(|id| *id != step);
    let reason = format!("not run, because {} failed", step.word());
    std::iter::once(failed)
        .chain(rest.map(|id| SmokeStep::skip(id, reason.clone())))
        .collect()
}

/// Wait for the end of the child until a time.
fn wait(child: &mut dyn SupervisedChild, until: Instant) -> Option<Option<String>> {
    loop {
        let ended = child.ended();
        if ended.is_some() || Instant::now() >= until {
            return ended;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn crashed(step: StepId, call: &str, how: Option<String>) -> SmokeStep {
    let how = how.unwrap_or_else(|| "it ended without a result".to_owned());
    SmokeStep::fail(
        step,
        format!("the process that calls the driver ended in {call}: {how}"),
        "the driver's library crashes, so programs that use it do",
        "look for an XID in the node's kernel log (dmesg | grep NVRM), and check that the library belongs to the loaded driver (divvy doctor, D05)",
    )
}

fn hung(child: &mut dyn SupervisedChild, step: StepId, call: &str, timeout: Duration) -> SmokeStep {
    child.kill();
    let seconds = seconds(timeout);
    let found = match wait(child, Instant::now() + LAST) {
        Some(_) => format!("{call} had not returned after {seconds}, and the process was killed"),
        None => format!(
            "{call} had not returned after {seconds}, and the process cannot be killed: hung in the kernel, {}",
            child.place()
        ),
    };
    SmokeStep {
        // Without the name of a call of the driver, the program may not have come to one.
        gpu_at_fault: call.starts_with("cu") && tests_gpu(step),
        ..SmokeStep::fail(
            step,
            found,
            "programs on this GPU wait indefinitely",
            "look for an XID in the node's kernel log (dmesg | grep NVRM); reset the GPU, or reboot the node if the process stays; --timeout gives a slow GPU more time",
        )
    }
}

/// Return a time as text. Code that prints any floating-point number would be a large part of the program.
fn seconds(time: Duration) -> String {
    match time.subsec_millis() {
        0 => format!("{} s", time.as_secs()),
        _ => format!("{} ms", time.as_millis()),
    }
}
