//! A hanging or crashing child is reported in time.

use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use divvy_smoke::run::Message;
use divvy_smoke::supervise::{SupervisedChild, supervise};
use divvy_smoke_report::{SmokeOutcome, SmokeReport, SmokeStep, StepId, StepStatus};

/// A child that a test describes.
struct Described {
    /// How it ended without being killed.
    ended: Option<Option<String>>,
    /// Whether killing it has an effect.
    can_be_killed: bool,
    call: Option<(StepId, String)>,
    killed: usize,
    /// Closed when the child has ended.
    output: Option<Sender<Message>>,
}

impl SupervisedChild for Described {
    fn kill(&mut self) {
        self.killed += 1;
        if self.can_be_killed {
            self.ended = Some(Some("signal: 9 (SIGKILL)".to_owned()));
            self.output = None;
        }
    }

    fn ended(&mut self) -> Option<Option<String>> {
        self.ended.clone()
    }

    fn place(&mut self) -> String {
        "state D, wchan nvidia_ioctl".to_owned()
    }

    fn call(&mut self) -> Option<(StepId, String)> {
        self.call.clone()
    }
}

const STEPS: [StepId; 4] = [StepId::S01, StepId::S02, StepId::S03, StepId::S08];

/// Supervise a child that has reported S01, and return all steps with the time that it took.
fn outcome(child: &mut Described, timeout: Duration, reported: &[StepId]) -> (Vec<SmokeStep>, Duration) {
    let (sender, messages) = channel();
    for id in reported {
        sender.send(Message::Step(SmokeStep::pass(*id, "", 1))).expect("sent");
    }
    child.output = child.ended.is_none().then_some(sender);
    let (began, mut steps) = (Instant::now(), Vec::new());
    let rest = supervise(&messages, child, &STEPS, timeout, began, &mut |message| match message {
        Message::Step(step) => steps.push(step),
        other => panic!("{other:?}"),
    });
    steps.extend(rest);
    (steps, began.elapsed())
}

fn child(ended: Option<Option<String>>, can_be_killed: bool) -> Described {
    Described {
        ended,
        can_be_killed,
        call: Some((StepId::S02, "cuStreamSynchronize".to_owned())),
        killed: 0,
        output: None,
    }
}

/// A child that cannot be killed is reported, too.
#[test]
fn a_hanging_child_is_killed_and_reported() {
    for can_be_killed in [true, false] {
        let mut child = child(None, can_be_killed);
        let (steps, took) = outcome(&mut child, Duration::from_millis(200), &[StepId::S01]);
        assert!(took < Duration::from_millis(2200), "{took:?}");
        assert_eq!(child.killed, 1);
        let statuses: Vec<_> = steps.iter().map(|step| (step.id, step.status)).collect();
        assert_eq!(
            statuses,
            [
                (StepId::S01, StepStatus::Pass),
                (StepId::S02, StepStatus::Fail),
                (StepId::S03, StepStatus::Skip)
            ]
        );
        let expected = if can_be_killed {
            "cuStreamSynchronize had not returned after 200 ms, and the process was killed"
        } else {
            "cuStreamSynchronize had not returned after 200 ms, and the process cannot be killed: hung in the kernel, state D, wchan nvidia_ioctl"
        };
        assert_eq!(steps[1].found, expected);
        assert!(steps[1].gpu_at_fault);
        assert_eq!(steps[2].found, "not run, because S02 failed");
    }
}

/// The hanging call must be a call of the driver, in a step that tests the GPU.
#[test]
fn only_a_hanging_driver_call_blames_the_gpu() {
    for (call, at_fault) in [
        (Some((StepId::S02, "cuLaunchKernel")), true),
        (Some((StepId::S02, "dlopen")), false),
        (None, false),
    ] {
        let mut child = child(None, true);
        child.call = call.map(|(id, call)| (id, call.to_owned()));
        let (steps, _) = outcome(&mut child, Duration::from_millis(50), &[StepId::S01]);
        assert_eq!(
            (steps[1].status, steps[1].gpu_at_fault),
            (StepStatus::Fail, at_fault),
            "{call:?}"
        );
    }
}

#[test]
fn a_child_that_crashes_fails_the_step_that_it_was_in() {
    for (how, part) in [
        (
            Some("signal: 11 (SIGSEGV)".to_owned()),
            "ended in cuStreamSynchronize: signal: 11 (SIGSEGV)",
        ),
        (None, "ended in cuStreamSynchronize: it ended without a result"),
    ] {
        let mut child = child(Some(how), true);
        let (steps, _) = outcome(&mut child, Duration::from_secs(60), &[StepId::S01]);
        assert_eq!((steps.len(), child.killed), (3, 0));
        assert!(steps[1].found.contains(part), "{}", steps[1].found);
        assert!(!steps[1].gpu_at_fault, "the out-of-memory killer ends processes, too");
        assert_eq!(SmokeReport::new(None, steps).result, SmokeOutcome::Fail);
    }
}

/// The child crashes or hangs after its last step.
#[test]
fn a_child_that_crashes_late_has_not_passed() {
    let all = [StepId::S01, StepId::S02, StepId::S03];
    for ended in [Some(Some("exit status: 1".to_owned())), None] {
        let mut child = child(ended, true);
        child.call = Some((StepId::S03, "cuDevicePrimaryCtxRelease_v2".to_owned()));
        let (steps, _) = outcome(&mut child, Duration::from_millis(100), &all);
        let last = steps.last().expect("a step");
        assert_eq!((last.id, last.status), (StepId::S03, StepStatus::Fail), "{steps:?}");
    }
}

#[test]
fn a_child_that_reported_everything_and_ended_adds_nothing() {
    let mut child = child(Some(None), true);
    let (steps, _) = outcome(&mut child, Duration::from_secs(60), &[StepId::S01, StepId::S02, StepId::S03]);
    assert_eq!(steps.len(), 3);
}

#[test]
fn without_a_page_the_first_step_that_was_not_reported_fails() {
    let mut child = child(None, true);
    child.call = None;
    let (steps, _) = outcome(&mut child, Duration::from_millis(50), &[StepId::S01]);
    assert_eq!((steps[1].id, steps[1].status), (StepId::S02, StepStatus::Fail));
}
