//! Which request to send when.

use std::collections::BTreeSet;
use std::time::Duration;

use divvy_smoke_report::{SmokeOutcome, SmokeReport};

use crate::calls::RecentCalls;
use crate::mark::Mark;
use crate::{GpuVerdict, PROGRAM, Planned, TestPodState, TestTarget};

/// The limits of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RunLimits {
    /// The largest number of pods at a time.
    pub parallel: usize,
    /// The largest number of requests to the API server within any second.
    pub calls: usize,
    /// How many requests it takes to explain why pods wait: the cluster is read once for all of them.
    pub calls_to_explain: usize,
    /// How long a pod may wait for a node, or for its image, until that is reported.
    pub pending: Duration,
    /// How long a pod may exist.
    pub total: Duration,
    /// Whether marks are written on the nodes: GPUs that fail go out of service, and GPUs that failed earlier come back if they pass.
    pub report: bool,
}

/// The requests that it takes to create the pod of a GPU that is out of service: to open it for the test, to list and watch its node until its agent says so,
/// and to create the pod.
const CALLS_OF_TEST_AGAIN: usize = 4;

/// The beginning of a MIG device's UUID.
const MIG: &str = "MIG-";

/// The number of characters of a container runtime's error that are kept.
const START_ERROR: usize = 1000;

/// Something that happened. Pods have the numbers of their GPUs in the plan.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RunEvent {
    /// The API server created a pod.
    Created(usize),
    /// The API server refused a pod, so that there is none.
    Refused {
        /// The number.
        number: usize,
        /// What the API server says.
        why: String,
        /// What was tried: the pod's manifest.
        tried: Option<String>,
    },
    /// It is unknown whether the API server created a pod.
    Unclear(usize, String),
    /// The watch reported a pod.
    Seen(usize, TestPodState),
    /// The watch reported that a pod is gone.
    Gone(usize),
    /// The API server deleted a pod.
    Deleted(usize),
    /// A pod could not be deleted.
    Undeletable(usize, String),
    /// The mark of a GPU was written on its node, or could not be written for this reason.
    Marked(usize, Option<String>),
    /// What `divvy why` says about these pods. Pods about which it says nothing are missing.
    Explained(Vec<(usize, String)>),
    /// The user wants no more.
    Stop,
    /// Time has passed.
    Time,
}

/// A request to send.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SmokeAction {
    /// Create the pod with this number. If the GPU is out of service ([`TestTarget::failed_before`]), first write [`Mark::Testing`] on its node, and
    /// wait until the node's inventory says so.
    Create(usize),
    /// Write this mark on the node of the GPU with this number.
    Mark(usize, Mark),
    /// Delete the pod with this number.
    Delete(usize),
    /// Find out why these pods wait.
    Explain(Vec<usize>),
}

/// Where a mark is on its way to the node.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Marking {
    /// There is none.
    Nothing,
    /// It is to be sent.
    Due(Mark),
    /// It was sent.
    Sent(Mark),
    /// It was written, or could not be written for this reason.
    Over(Mark, Option<String>),
}

/// Where a pod is on its way.
#[derive(Debug, Clone, PartialEq, Eq)]
enum PodProgress {
    /// It is not needed, or not needed yet.
    None,
    /// Its creation was sent.
    Asked,
    /// It exists.
    There {
        since: u64,
        /// Since when it waits for something that does not pass on its own, and what that is.
        waits: Option<(u64, TestPodState)>,
        /// Whether its wait is explained right now.
        is_asked: bool,
    },
    /// It is to be deleted.
    Unwanted,
    /// Its deletion was sent.
    Leaving,
    /// It is gone, or could not be deleted.
    Over,
}

#[derive(Debug, Clone)]
struct Try {
    target: TestTarget,
    verdict: Option<GpuVerdict>,
    marking: Marking,
    pod: PodProgress,
    /// When its creation was sent, and when its result was known.
    began: u64,
    ended: u64,
}

/// A GPU and its result.
#[derive(Debug, Clone, Copy)]
pub struct Tried<'r> {
    /// The GPU.
    pub target: &'r TestTarget,
    /// Its result.
    pub verdict: &'r GpuVerdict,
    /// How long the test took.
    pub time: Duration,
    /// The mark that was written on its node, and, if that failed, the reason.
    pub marked: Option<(&'r Mark, Option<&'r str>)>,
}

/// A run: the state of each GPU's test.
#[derive(Debug, Clone)]
pub struct SmokeRun {
    limits: RunLimits,
    calls: RecentCalls,
    tries: Vec<Try>,
    /// The next GPU whose pod was not created yet.
    next: usize,
    /// The pods that may exist.
    live: BTreeSet<usize>,
    /// How many GPUs have no result yet.
    open: usize,
    /// The GPUs whose marks are to be written, or are being written.
    unmarked: BTreeSet<usize>,
    /// The time of the last step.
    now_ms: u64,
    is_stopped: bool,
    is_explaining: bool,
    /// The pods that could not be deleted, and why.
    left: Vec<(usize, String)>,
}

impl SmokeRun {
    /// Begin a run of these GPUs.
    pub fn new(planned: &[Planned], limits: RunLimits) -> SmokeRun {
        let tries = planned.iter().map(|one| Try {
            target: one.target.clone(),
            verdict: one.ask.as_ref().err().cloned(),
            marking: Marking::Nothing,
            pod: PodProgress::None,
            began: 0,
            ended: 0,
        });
        let tries: Vec<Try> = tries.collect();
        SmokeRun {
            calls: RecentCalls::new(limits.calls),
            limits,
            open: tries.iter().filter(|one| one.verdict.is_none()).count(),
            tries,
            unmarked: BTreeSet::new(),
            next: 0,
            live: BTreeSet::new(),
            now_ms: 0,
            is_stopped: false,
            is_explaining: false,
            left: Vec::new(),
        }
    }

    /// Take note of an event, and return the requests to send now.
    pub fn step(&mut self, now_ms: u64, event: RunEvent) -> Vec<SmokeAction> {
        self.now_ms = now_ms;
        match event {
            RunEvent::Time => {}
            RunEvent::Stop => self.stop(now_ms),
            RunEvent::Created(number) => self.created(now_ms, number),
            RunEvent::Unclear(number, why) => {
                let found = format!("the API server did not say whether it created the pod: {why}");
                self.end(now_ms, number, GpuVerdict::untried(found));
            }
            RunEvent::Refused { number, why, tried } => {
                let verdict = GpuVerdict::Untried {
                    reason: why,
                    explanation: tried,
                };
                self.conclude(now_ms, number, verdict);
                self.over(number);
            }
            RunEvent::Seen(number, seen) => self.seen(now_ms, number, seen),
            RunEvent::Gone(number) => {
                let is_there = self
                    .tries
                    .get(number)
                    .is_some_and(|one| !matches!(one.pod, PodProgress::None | PodProgress::Over));
                if is_there {
                    self.conclude(
                        now_ms,
                        number,
                        GpuVerdict::untried("the pod was deleted before the test ended"),
                    );
                    self.over(number);
                }
            }
            RunEvent::Deleted(number) => self.over(number),
            RunEvent::Undeletable(number, why) => {
                self.left.push((number, why));
                self.over(number);
            }
            RunEvent::Marked(number, trouble) => self.marked(number, trouble),
            RunEvent::Explained(answers) => self.explained(now_ms, answers),
        }
        self.late(now_ms);
        self.actions(now_ms)
    }

    /// Report whether nothing is left to do.
    pub fn is_over(&self) -> bool {
        self.live.is_empty() && self.open == 0 && self.unmarked.is_empty()
    }

    /// Return when the next step is due, if nothing happens before.
    pub fn next_ms(&self) -> Option<u64> {
        let unwanted = self
            .live
            .iter()
            .any(|number| self.tries[*number].pod == PodProgress::Unwanted);
        let is_due = |number: &usize| matches!(self.tries[*number].marking, Marking::Due(_));
        let wants_to_send =
            unwanted || self.unmarked.iter().any(is_due) || self.has_next() || !self.unexplained(self.now_ms).is_empty();
        let calls = self.calls.next().filter(|_| wants_to_send);
        let ends = self.live.iter().flat_map(|number| match &self.tries[*number].pod {
            PodProgress::There { since, waits, is_asked } => {
                let total = since.saturating_add(millis(self.limits.total));
                let pending = waits.as_ref().filter(|_| !is_asked && !self.is_explaining);
                [
                    Some(total),
                    pending.map(|(since, _)| since.saturating_add(millis(self.limits.pending))),
                ]
            }
            _ => [None, None],
        });
        let due = calls.into_iter().chain(ends.flatten());
        due.filter(|due| *due > self.now_ms).min()
    }

    /// Return how many GPUs have a result, and how many there are.
    pub fn progress(&self) -> (usize, usize) {
        (self.tries.len() - self.open, self.tries.len())
    }

    /// Return how many pods may exist.
    pub fn pods(&self) -> usize {
        self.live.len()
    }

    /// Return the pods that could not be deleted, with the reasons.
    pub fn left(&self) -> &[(usize, String)] {
        &self.left
    }

    /// Return the GPUs and their results.
    pub fn results(&self) -> impl Iterator<Item = Tried<'_>> {
        self.tries.iter().filter_map(|one| {
            Some(Tried {
                target: &one.target,
                verdict: one.verdict.as_ref()?,
                time: Duration::from_millis(one.ended.saturating_sub(one.began)),
                marked: match &one.marking {
                    Marking::Over(mark, trouble) => Some((mark, trouble.as_deref())),
                    _ => None,
                },
            })
        })
    }

    fn created(&mut self, now_ms: u64, number: usize) {
        let is_stopped = self.is_stopped;
        let Some(one) = self.tries.get_mut(number).filter(|one| one.pod == PodProgress::Asked) else {
            return;
        };
        // The result of a run that was stopped is known before its pod is.
        let is_unwanted = is_stopped || one.verdict.is_some();
        one.pod = if is_unwanted {
            PodProgress::Unwanted
        } else {
            PodProgress::There {
                since: now_ms,
                waits: None,
                is_asked: false,
            }
        };
    }

    fn seen(&mut self, now_ms: u64, number: usize, seen: TestPodState) {
        // The watch may report a pod before the answer to its creation arrives.
        self.created(now_ms, number);
        let Some(one) = self.tries.get_mut(number) else { return };
        let PodProgress::There { waits, .. } = &mut one.pod else {
            return;
        };
        match seen {
            TestPodState::Ended { status, reason, message } => {
                let verdict = judge(&one.target, status, reason.as_deref(), message.as_deref());
                self.end(now_ms, number, verdict);
            }
            TestPodState::Unscheduled(_) | TestPodState::Starting(Some(_)) => {
                let since = waits.as_ref().map_or(now_ms, |(since, _)| *since);
                *waits = Some((since, seen));
            }
            TestPodState::Starting(None) | TestPodState::Running => *waits = None,
        }
    }

    /// Note a result, unless there is one.
    fn conclude(&mut self, now_ms: u64, number: usize, verdict: GpuVerdict) {
        if let Some(one) = self.tries.get_mut(number).filter(|one| one.verdict.is_none()) {
            let mark = self.limits.report.then(|| Mark::of(&one.target, &verdict)).flatten();
            // If the pod's creation was never sent, neither was anything about its GPU.
            if let Some(mark) = mark.filter(|_| one.pod != PodProgress::None) {
                one.marking = Marking::Due(mark);
                self.unmarked.insert(number);
            }
            one.verdict = Some(verdict);
            one.ended = now_ms;
            self.open -= 1;
        }
    }

    fn marked(&mut self, number: usize, trouble: Option<String>) {
        let Some(one) = self.tries.get_mut(number) else { return };
        if let Marking::Sent(mark) = &one.marking {
            one.marking = Marking::Over(mark.clone(), trouble);
            self.unmarked.remove(&number);
        }
    }

    /// Note a result, and let the pod be deleted.
    fn end(&mut self, now_ms: u64, number: usize, verdict: GpuVerdict) {
        self.conclude(now_ms, number, verdict);
        if let Some(one) = self
            .tries
            .get_mut(number)
            .filter(|one| matches!(one.pod, PodProgress::Asked | PodProgress::There { .. }))
        {
            one.pod = PodProgress::Unwanted;
        }
    }

    fn over(&mut self, number: usize) {
        if self.live.remove(&number) {
            self.tries[number].pod = PodProgress::Over;
        }
    }

    fn stop(&mut self, now_ms: u64) {
        self.is_stopped = true;
        for number in 0..self.tries.len() {
            if self.tries[number].verdict.is_some() {
                continue;
            }
            self.conclude(now_ms, number, GpuVerdict::untried("stopped before the test had ended"));
            // A pod whose creation was sent is deleted when the API server has answered.
            let one = &mut self.tries[number];
            if matches!(one.pod, PodProgress::There { .. }) {
                one.pod = PodProgress::Unwanted;
            }
        }
    }

    fn explained(&mut self, now_ms: u64, answers: Vec<(usize, String)>) {
        self.is_explaining = false;
        for number in self.live.clone() {
            let PodProgress::There { waits, is_asked, .. } = &mut self.tries[number].pod else {
                continue;
            };
            if !std::mem::take(is_asked) {
                continue;
            }
            // The pod may have got a node while the cluster was read.
            let Some((_, TestPodState::Unscheduled(said))) = waits else {
                continue;
            };
            let said = said.clone();
            let answer = answers.iter().find(|(of, _)| *of == number);
            let verdict = GpuVerdict::Untried {
                reason: format!(
                    "no node took the pod: {}",
                    said.as_deref().unwrap_or(
                        "the scheduler has said nothing about it; divvy scheduler-config --check finds out whether it runs"
                    )
                ),
                explanation: answer.map(|(_, text)| text.clone()),
            };
            self.end(now_ms, number, verdict);
        }
    }

    /// Give up on pods that take too long.
    fn late(&mut self, now_ms: u64) {
        let (pending, total) = (millis(self.limits.pending), millis(self.limits.total));
        for number in self.live.clone() {
            let PodProgress::There { since, waits, .. } = &self.tries[number].pod else {
                continue;
            };
            let verdict = match waits {
                Some((waits, TestPodState::Starting(Some(why)))) if now_ms.saturating_sub(*waits) >= pending => {
                    GpuVerdict::untried(format!("the container does not start: {why}"))
                }
                _ if now_ms.saturating_sub(*since) >= total => {
                    GpuVerdict::untried(format!("the test did not end within {} s", self.limits.total.as_secs()))
                }
                _ => continue,
            };
            self.end(now_ms, number, verdict);
        }
    }

    /// Return the pods that wait for a node, and whose wait must be explained.
    fn unexplained(&self, now_ms: u64) -> Vec<usize> {
        if self.is_explaining {
            return Vec::new();
        }
        let pending = millis(self.limits.pending);
        let waits = self.live.iter().filter(|number| match &self.tries[**number].pod {
            PodProgress::There {
                waits: Some((since, TestPodState::Unscheduled(_))),
                is_asked: false,
                ..
            } => now_ms.saturating_sub(*since) >= pending,
            _ => false,
        });
        waits.copied().collect()
    }

    fn has_next(&self) -> bool {
        self.next < self.tries.len() && !self.is_stopped && self.live.len() < self.limits.parallel.max(1)
    }

    /// Choose the requests to send now: what makes room first.
    fn actions(&mut self, now_ms: u64) -> Vec<SmokeAction> {
        let mut actions = Vec::new();
        for number in self.unmarked.clone() {
            let one = &mut self.tries[number];
            // Until the creation is answered, the earlier mark may still be on its way.
            if one.pod == PodProgress::Asked {
                continue;
            }
            if let Marking::Due(mark) = one.marking.clone() {
                if !self.calls.take(now_ms, 1) {
                    return actions;
                }
                one.marking = Marking::Sent(mark.clone());
                actions.push(SmokeAction::Mark(number, mark));
            }
        }
        for number in self.live.clone() {
            if self.tries[number].pod == PodProgress::Unwanted {
                if !self.calls.take(now_ms, 1) {
                    return actions;
                }
                self.tries[number].pod = PodProgress::Leaving;
                actions.push(SmokeAction::Delete(number));
            }
        }
        let wait = self.unexplained(now_ms);
        if !wait.is_empty() {
            if !self.calls.take(now_ms, self.limits.calls_to_explain) {
                return actions;
            }
            for number in &wait {
                if let PodProgress::There { is_asked, .. } = &mut self.tries[*number].pod {
                    *is_asked = true;
                }
            }
            self.is_explaining = true;
            actions.push(SmokeAction::Explain(wait));
        }
        while self.has_next() {
            let Some(one) = self.tries.get_mut(self.next) else { break };
            if one.verdict.is_some() {
                self.next += 1;
                continue;
            }
            let calls = if one.target.failed_before.is_some() {
                CALLS_OF_TEST_AGAIN
            } else {
                1
            };
            if !self.calls.take(now_ms, calls) {
                return actions;
            }
            one.pod = PodProgress::Asked;
            one.began = now_ms;
            self.live.insert(self.next);
            actions.push(SmokeAction::Create(self.next));
            self.next += 1;
        }
        actions
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// Judge how a container ended. The message comes from the container, and so from the node: it counts only if it agrees with the exit status and
/// is about the right GPU.
fn judge(target: &TestTarget, status: Option<i64>, reason: Option<&str>, message: Option<&str>) -> GpuVerdict {
    let ended = |what: &str| {
        let status = status.map_or_else(|| "never ran".to_owned(), |status| format!("ended with status {status}"));
        let reason = reason.map(|reason| format!(" ({reason})")).unwrap_or_default();
        GpuVerdict::untried(format!("the container {status}{reason}{what}"))
    };
    let Some(message) = message.filter(|message| !message.is_empty()) else {
        return ended(" and left no result");
    };
    // Then the message is the container runtime's (the kubelet's `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
    if matches!(reason, Some("StartError" | "ContainerCannotRun")) {
        let said: String = message.chars().take(START_ERROR).collect();
        return GpuVerdict::untried(format!(
            "the container could not be started: {said}; if Divvy's agent is not installed, the image must be Divvy's, which has {PROGRAM}"
        ));
    }
    let report = match SmokeReport::read(message) {
        Ok(report) => report,
        Err(error) => return ended(&format!(", and its result cannot be read: {error}")),
    };
    if status != Some(i64::from(report.result.exit_status())) {
        return ended(&format!(", and its result says {}", report.result.word()));
    }
    match &report.gpu {
        Some(gpu) if gpu.uuid != target.uuid && gpu.uuid.starts_with(MIG) && target.uuid.starts_with(MIG) => {
            GpuVerdict::untried(format!(
                "the container got another MIG device of the same profile ({}): kube-scheduler does not ask the extender about pods with this profile; \
                 divvy scheduler-config --mig-profile PROFILE prints the configuration with which it does",
                gpu.uuid
            ))
        }
        Some(gpu) if gpu.uuid != target.uuid => GpuVerdict::Broken {
            found: format!(
                "the container got GPU {}, and {} was allocated to its pod",
                gpu.uuid, target.uuid
            ),
            why: "pods use other GPUs than the scheduler counts".to_owned(),
            fix: "divvy doctor, on the node, names what else gives GPUs to containers".to_owned(),
        },
        None if matches!(report.result, SmokeOutcome::Pass | SmokeOutcome::Warn) => {
            ended(&format!(", and its result says {} of no GPU", report.result.word()))
        }
        _ => GpuVerdict::Tested(Box::new(report)),
    }
}
