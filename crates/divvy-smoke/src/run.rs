//! The steps of a run, one after the other, on any driver.

use std::time::Instant;

use divvy_smoke_report::{SmokeStep, StepId, TestedGpu};
use serde::{Deserialize, Serialize};

use crate::codes::{self, StepFinding};
use crate::driver::Driver;
use crate::sizes::Sizes;
use crate::steps::accounting::SecondProcess;
use crate::steps::open::{self, AskedGpu, LimitOf, Opened};
use crate::steps::vector::{self, SampleNote};
use crate::steps::{DoneStep, StepOutcome, StepProblem, accounting, copies, matrix, memory, share, tensor};

/// What a run says while it goes on. The child writes each as a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The GPU was described.
    Gpu(TestedGpu),
    /// A step has ended.
    Step(SmokeStep),
    /// A line of the command `vector-add`.
    Line(String),
    /// What that command says about an error.
    Error(String),
    /// What the second process of S09 holds.
    Held(accounting::HeldMemory),
}

/// What is to be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SmokePlan {
    /// In their order. S01 is the first one.
    pub steps: Vec<StepId>,
    pub isolation: bool,
    pub tensor: bool,
    /// Whether S03 tests all memory that is free.
    pub all_memory: bool,
    /// Whether the lines of CUDA's sample are wanted.
    pub sample: bool,
    pub asked: AskedGpu,
    /// Replaces the sizes that follow from the memory.
    pub sizes: Option<Sizes>,
}

/// What a run needs of the process in which it takes place.
#[expect(missing_debug_implementations, reason = "functions have no text")]
pub struct SmokeWorld<'w> {
    /// The path of the driver's library.
    pub library: &'w str,
    /// What the guard holds the container to, for a UUID.
    pub limit: &'w LimitOf<'w>,
    /// Called before each step.
    pub begin: &'w dyn Fn(StepId),
    pub second: &'w mut dyn SecondProcess,
    pub tell: &'w mut dyn FnMut(Message),
}

/// Run the steps that need the driver.
pub fn run(driver: &dyn Driver, plan: &SmokePlan, world: &mut SmokeWorld<'_>) {
    let steps: Vec<StepId> = plan.steps.iter().copied().filter(|id| *id != StepId::S08).collect();
    let last = steps.last().copied();
    let mut opened: Option<Opened<'_>> = None;
    let mut stopped: Option<String> = None;
    for id in steps {
        let began = Instant::now();
        if let Some(reason) = &stopped {
            (world.tell)(Message::Step(SmokeStep::skip(id, reason.clone())));
            continue;
        }
        (world.begin)(id);
        let mut outcome = match (&opened, id) {
            (None, _) => {
                let looked = open::run(driver, world.library, &plan.asked, world.limit, plan.sizes);
                if let Some(gpu) = looked.gpu {
                    (world.tell)(Message::Gpu(gpu));
                }
                looked.outcome.map(|(open, done)| {
                    opened = Some(open);
                    done
                })
            }
            (Some(open), id) => step(id, open, plan, world),
        };
        let is_usable = !matches!(outcome, Err(StepProblem::Failed(_) | StepProblem::Finding(_)));
        if Some(id) == last
            && is_usable
            && let Some(Err(failure)) = opened.as_ref().map(|open| open.bench.close())
        {
            outcome = Err(failure.into());
        }
        let mut step = result(id, outcome);
        step.ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        stopped = match step.status {
            divvy_smoke_report::StepStatus::Fail => Some(format!("not run, because {} failed", id.word())),
            _ if opened.is_none() => Some(format!("not run, because {} was skipped", id.word())),
            _ => None,
        };
        if plan.sample && id == StepId::S02 && stopped.is_none() {
            for line in vector::PASSED {
                (world.tell)(Message::Line(line.to_owned()));
            }
        }
        (world.tell)(Message::Step(step));
    }
}

fn step(id: StepId, open: &Opened<'_>, plan: &SmokePlan, world: &mut SmokeWorld<'_>) -> StepOutcome {
    let (bench, grant) = (&open.bench, &plan.asked.grant);
    match id {
        StepId::S02 => sample(open, plan, world),
        StepId::S03 => memory::run(bench, plan.all_memory.then_some((grant, open.limit))),
        StepId::S04 => matrix::run(bench),
        StepId::S05 => match no_tensor(open, plan) {
            Some(reason) => Err(StepProblem::Skip(reason)),
            None => tensor::run(bench),
        },
        StepId::S06 => copies::run(bench, &open.gpu.name),
        StepId::S07 => share::run(bench, grant, open.limit, plan.isolation),
        StepId::S09 if plan.isolation => accounting::run(bench, grant, open.limit, world.second),
        StepId::S09 => Err(StepProblem::Skip("only with --isolation".to_owned())),
        StepId::S01 | StepId::S08 => Err(StepProblem::Skip("not a step of its own".to_owned())),
    }
}

/// Add vectors. For the command `vector-add`, say what the sample says.
fn sample(open: &Opened<'_>, plan: &SmokePlan, world: &mut SmokeWorld<'_>) -> StepOutcome {
    let mut doing = "";
    let outcome = vector::run(&open.bench, &mut |note| match note {
        SampleNote::Line(line) if plan.sample => (world.tell)(Message::Line(line)),
        SampleNote::Line(_) => {}
        SampleNote::Doing(what) => doing = what,
    });
    if plan.sample {
        match &outcome {
            Err(StepProblem::Failed(failure)) => {
                let code = codes::name(failure.code);
                let code = code.split(", ").last().unwrap_or_default();
                (world.tell)(Message::Error(format!("Failed to {doing} (error code {code})!")));
            }
            Err(StepProblem::Finding(finding)) => (world.tell)(Message::Error(finding.found.clone())),
            Ok(_) | Err(StepProblem::Skip(_)) => {}
        }
    }
    outcome
}

/// Return why the tensor cores are not tried.
fn no_tensor(open: &Opened<'_>, plan: &SmokePlan) -> Option<String> {
    let cuda = open
        .gpu
        .cuda
        .split('.')
        .next()
        .and_then(|major| major.parse::<u32>().ok())
        .unwrap_or(0);
    if open.capability < (8, 0) {
        return Some(format!(
            "the GPU has compute capability {}, and the kernel needs 8.0",
            open.gpu.cc
        ));
    }
    if cuda < 11 {
        return Some(format!("the driver is for CUDA {}, and the kernel needs 11.0", open.gpu.cuda));
    }
    let is_shared = plan.asked.grant.is_shared(open.limit);
    (is_shared && !plan.tensor).then(|| "the GPU is shared; --tensor runs it nevertheless".to_owned())
}

/// Report whether a failure of a step can show that the GPU itself is at fault. S07 and S09 fail because of how the share is enforced.
pub(crate) fn tests_gpu(id: StepId) -> bool {
    !matches!(id, StepId::S07 | StepId::S09)
}

/// Return the step of the report.
pub fn result(id: StepId, outcome: StepOutcome) -> SmokeStep {
    let failed = |finding: StepFinding| SmokeStep {
        gpu_at_fault: finding.gpu_at_fault && tests_gpu(id),
        ..SmokeStep::fail(id, finding.found, finding.why, finding.fix)
    };
    match outcome {
        Ok(DoneStep { found, bytes: 0, .. }) if id.compares() => failed(StepFinding::new(
            format!("{found}; no byte was compared"),
            "a step that compared nothing proves nothing",
            "report it with this output",
        )),
        Ok(DoneStep {
            found,
            bytes,
            warning: Some(warning),
        }) => SmokeStep {
            bytes,
            ..SmokeStep::warn(id, format!("{}; {found}", warning.found), warning.why, warning.fix)
        },
        Ok(DoneStep { found, bytes, .. }) => SmokeStep::pass(id, found, bytes),
        Err(StepProblem::Failed(failure)) => failed(codes::explain(&failure)),
        Err(StepProblem::Finding(finding)) => failed(finding),
        Err(StepProblem::Skip(reason)) => SmokeStep::skip(id, reason),
    }
}

#[cfg(test)]
mod tests {
    use divvy_smoke_report::StepStatus;

    use super::*;

    #[test]
    fn a_step_that_compared_nothing_has_failed() {
        for id in StepId::ALL {
            let step = result(id, Ok(DoneStep::new("done", 0)));
            let expected = if id.compares() { StepStatus::Fail } else { StepStatus::Pass };
            assert_eq!(step.status, expected, "{id:?}");
            assert_eq!(result(id, Ok(DoneStep::new("done", 1))), SmokeStep::pass(id, "done", 1));
        }
    }
}
