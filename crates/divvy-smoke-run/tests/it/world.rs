//! An API server, a scheduler, and nodes in virtual time, which answer the actions of a run.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use divvy_smoke_report::{SmokeReport, SmokeStep, StepId, TestedGpu};
use divvy_smoke_run::{Mark, Planned, RunEvent, RunLimits, SmokeAction, SmokeRun, TestAsk, TestPodState, TestTarget};

pub(crate) const LIMITS: RunLimits = RunLimits {
    parallel: 8,
    calls: 16,
    calls_to_explain: 10,
    pending: Duration::from_secs(15),
    total: Duration::from_secs(150),
    report: false,
};

/// A plan with this many GPUs, 8 on each node.
pub(crate) fn planned(gpus: usize) -> Vec<Planned> {
    let one = |number: usize| Planned {
        target: TestTarget {
            node: format!("n{}", number / 8),
            hostname: format!("host-{}", number / 8),
            index: u32::try_from(number % 8).ok(),
            uuid: format!("GPU-{number}"),
            model: "NVIDIA H100".to_owned(),
            failed_before: None,
        },
        ask: Ok(TestAsk::Units(1)),
    };
    (0..gpus).map(one).collect()
}

/// A report about a GPU.
pub(crate) fn report(uuid: &str, steps: Vec<SmokeStep>) -> SmokeReport {
    let gpu = TestedGpu {
        uuid: uuid.to_owned(),
        name: "NVIDIA H100".to_owned(),
        ..TestedGpu::default()
    };
    SmokeReport::new(Some(gpu), steps)
}

/// What a pod looks like when its container has reported.
pub(crate) fn ended(report: &SmokeReport) -> TestPodState {
    TestPodState::Ended {
        status: Some(i64::from(report.result.exit_status())),
        reason: None,
        message: Some(report.json()),
    }
}

pub(crate) fn passed(uuid: &str) -> TestPodState {
    let steps = [StepId::S02, StepId::S03, StepId::S04].map(|id| SmokeStep::pass(id, "as it should be", 200_000));
    ended(&report(uuid, steps.to_vec()))
}

/// What a pod looks like whose GPU computes wrongly.
pub(crate) fn wrong(uuid: &str) -> TestPodState {
    let mut step = SmokeStep::fail(StepId::S03, "1 of 8 words is wrong", "results are wrong", "drain the GPU");
    step.gpu_at_fault = true;
    ended(&report(uuid, vec![step]))
}

/// A plan with this many GPUs, of which these are out of service.
pub(crate) fn planned_with(gpus: usize, out: &BTreeSet<usize>) -> Vec<Planned> {
    let mut planned = planned(gpus);
    for number in out {
        planned[*number].target.failed_before = Some("S03 memory: wrong".to_owned());
    }
    planned
}

/// What the world does with the pods of some GPUs. All others pass.
#[derive(Default)]
pub(crate) struct World {
    /// Pods that the API server refuses.
    pub(crate) refused: BTreeSet<usize>,
    /// Pods whose creation it does not answer, although it creates them.
    pub(crate) unclear: BTreeSet<usize>,
    /// Pods that no node takes.
    pub(crate) unscheduled: BTreeSet<usize>,
    /// Pods that never end.
    pub(crate) endless: BTreeSet<usize>,
    /// Pods that cannot be deleted.
    pub(crate) undeletable: BTreeSet<usize>,
    /// GPUs on whose nodes nothing can be written.
    pub(crate) unmarkable: BTreeSet<usize>,
    /// When the user presses Ctrl-C.
    pub(crate) stop_at: Option<u64>,
    /// The results of pods.
    pub(crate) results: BTreeMap<usize, TestPodState>,
}

/// What happened.
pub(crate) struct History {
    pub(crate) run: SmokeRun,
    /// The times of all requests, in milliseconds.
    pub(crate) calls: Vec<u64>,
    /// The largest number of pods that existed at a time.
    pub(crate) most_pods: usize,
    /// The marks on the nodes at the end.
    pub(crate) marks: BTreeMap<usize, Mark>,
    /// The pods that exist at the end.
    pub(crate) left: BTreeSet<usize>,
    pub(crate) ended_at: u64,
}

impl World {
    /// Play a run to its end.
    pub(crate) fn play(&self, planned: &[Planned], limits: RunLimits) -> History {
        let mut run = SmokeRun::new(planned, limits);
        let mut queue: BinaryHeap<Reverse<(u64, u64)>> = BinaryHeap::new();
        let mut events: BTreeMap<u64, RunEvent> = BTreeMap::new();
        let mut serial = 0;
        let (mut calls, mut most_pods, mut pods) = (Vec::new(), 0, BTreeSet::new());
        let mut marks = BTreeMap::new();
        let mut now = 0;
        let mut later =
            |queue: &mut BinaryHeap<Reverse<(u64, u64)>>, events: &mut BTreeMap<u64, RunEvent>, at: u64, event: RunEvent| {
                serial += 1;
                queue.push(Reverse((at, serial)));
                events.insert(serial, event);
            };
        later(&mut queue, &mut events, 0, RunEvent::Time);
        if let Some(at) = self.stop_at {
            later(&mut queue, &mut events, at, RunEvent::Stop);
        }
        while !run.is_over() {
            let event = match (queue.peek().copied(), run.next_ms()) {
                (Some(Reverse((at, serial))), due) if due.is_none_or(|due| at <= due) => {
                    queue.pop();
                    now = at.max(now);
                    events.remove(&serial).expect("it is there")
                }
                (_, Some(due)) => {
                    assert!(due > now, "the run waits for {due}, and it is {now}");
                    now = due;
                    RunEvent::Time
                }
                (None, None) => panic!("nothing happens, and the run is not over: {:?}", run.progress()),
                (Some(_), None) => unreachable!(),
            };
            for action in run.step(now, event) {
                match action {
                    SmokeAction::Create(number) => {
                        calls.push(now);
                        let is_out = planned[number].target.failed_before.is_some();
                        if is_out {
                            calls.extend([now; 3]);
                        }
                        let is_marked = is_out && !self.unmarkable.contains(&number);
                        if is_marked {
                            marks.insert(number, Mark::Testing);
                        }
                        if self.refused.contains(&number) || is_marked != is_out {
                            later(
                                &mut queue,
                                &mut events,
                                now + 5,
                                RunEvent::Refused {
                                    number,
                                    why: "quota".to_owned(),
                                    tried: None,
                                },
                            );
                            continue;
                        }
                        pods.insert(number);
                        most_pods = most_pods.max(pods.len());
                        let answer = if self.unclear.contains(&number) {
                            RunEvent::Unclear(number, "timeout".to_owned())
                        } else {
                            RunEvent::Created(number)
                        };
                        later(&mut queue, &mut events, now + 5, answer);
                        let uuid = &planned[number].target.uuid;
                        if self.unscheduled.contains(&number) {
                            let said = TestPodState::Unscheduled(Some("0/4 nodes".to_owned()));
                            later(&mut queue, &mut events, now + 50, RunEvent::Seen(number, said));
                            continue;
                        }
                        later(
                            &mut queue,
                            &mut events,
                            now + 300,
                            RunEvent::Seen(number, TestPodState::Running),
                        );
                        if !self.endless.contains(&number) {
                            let seen = self.results.get(&number).cloned().unwrap_or_else(|| passed(uuid));
                            later(&mut queue, &mut events, now + 3000, RunEvent::Seen(number, seen));
                        }
                    }
                    SmokeAction::Delete(number) => {
                        calls.push(now);
                        if self.undeletable.contains(&number) {
                            later(
                                &mut queue,
                                &mut events,
                                now + 5,
                                RunEvent::Undeletable(number, "forbidden".to_owned()),
                            )
                        } else {
                            pods.remove(&number);
                            later(&mut queue, &mut events, now + 5, RunEvent::Deleted(number));
                            later(&mut queue, &mut events, now + 6, RunEvent::Gone(number));
                        }
                    }
                    SmokeAction::Mark(number, mark) => {
                        calls.push(now);
                        let trouble = self.unmarkable.contains(&number).then(|| "forbidden".to_owned());
                        if trouble.is_none() {
                            marks.insert(number, mark);
                        }
                        later(&mut queue, &mut events, now + 5, RunEvent::Marked(number, trouble));
                    }
                    SmokeAction::Explain(numbers) => {
                        calls.extend(std::iter::repeat_n(now, limits.calls_to_explain));
                        let answers = numbers
                            .into_iter()
                            .map(|number| (number, format!("pod {number} waits")))
                            .collect();
                        later(&mut queue, &mut events, now + 700, RunEvent::Explained(answers));
                    }
                }
            }
        }
        History {
            run,
            calls,
            most_pods,
            marks,
            left: pods,
            ended_at: now,
        }
    }
}

impl History {
    /// Return the largest number of requests within any second.
    pub(crate) fn calls_in_a_second(&self) -> usize {
        let in_second = |(at, begin): (usize, &u64)| self.calls[at..].iter().take_while(|call| **call < begin + 1000).count();
        self.calls.iter().enumerate().map(in_second).max().unwrap_or(0)
    }

    /// Return the word of each GPU's result.
    pub(crate) fn words(&self) -> Vec<&'static str> {
        self.run.results().map(|tried| tried.verdict.word()).collect()
    }
}
