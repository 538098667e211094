//! The steps of a run, one after the other, on any driver.

use std::time::Instant;

use divvy_smoke_report::{Gpu, Id, Step};
use serde::{Deserialize, Serialize};

use crate::codes::{self, Finding};
use crate::driver::Driver;
use crate::sizes::Sizes;
use crate::steps::accounting::Second;
use crate::steps::open::{self, Asked, LimitOf, Opened};
use crate::steps::vector::{self, Note};
use crate::steps::{Done, Outcome, Problem, accounting, copies, matrix, memory, share, tensor};

/// What a run says while it goes on. The child writes each as a line of JSON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Message {
    /// The GPU was described.
    Gpu(Gpu),
    /// A step has ended.
    Step(Step),
    /// A line of the command `vector-add`.
    Line(String),
    /// What that command says about an error.
    Error(String),
    /// What the second process of S09 holds.
    Held(accounting::Held),
}

/// What is to be done.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// In their order. S01 is the first one.
    pub steps: Vec<Id>,
    pub isolation: bool,
    pub tensor: bool,
    /// Whether S03 tests all memory that is free.
    pub all_memory: bool,
    /// Whether the lines of CUDA's sample are wanted.
    pub sample: bool,
    pub asked: Asked,
    /// Replaces the sizes that follow from the memory.
    pub sizes: Option<Sizes>,
}

/// What a run needs of the process in which it takes place.
#[expect(missing_debug_implementations, reason = "functions have no text")]
pub struct World<'w> {
    /// The path of the driver's library.
    pub library: &'w str,
    /// What the guard holds the container to, for a UUID.
    pub limit: &'w LimitOf<'w>,
    /// Called before each step.
    pub begin: &'w dyn Fn(Id),
    pub second: &'w mut dyn Second,
    pub tell: &'w mut dyn FnMut(Message),
}

/// Run the steps that need the driver.
pub fn run(driver: &dyn Driver, plan: &Plan, world: &mut World<'_>) {
    let steps: Vec<Id> = plan.steps.iter().copied().filter(|id| *id != Id::S08).collect();
    let last = steps.last().copied();
    let mut opened: Option<Opened<'_>> = None;
    let mut stopped: Option<String> = None;
    for id in steps {
        let began = Instant::now();
        if let Some(reason) = &stopped {
            (world.tell)(Message::Step(Step::skip(id, reason.clone())));
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
        let is_usable = !matches!(outcome, Err(Problem::Failed(_) | Problem::Finding(_)));
        if Some(id) == last
            && is_usable
            && let Some(Err(failure)) = opened.as_ref().map(|open| open.bench.close())
        {
            outcome = Err(failure.into());
        }
        let mut step = result(id, outcome);
        step.ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        stopped = match step.status {
            divvy_smoke_report::Status::Fail => Some(format!("not run, because {} failed", id.word())),
            _ if opened.is_none() => Some(format!("not run, because {} was skipped", id.word())),
            _ => None,
        };
        if plan.sample && id == Id::S02 && stopped.is_none() {
            for line in vector::PASSED {
                (world.tell)(Message::Line(line.to_owned()));
            }
        }
        (world.tell)(Message::Step(step));
    }
}

fn step(id: Id, open: &Opened<'_>, plan: &Plan, world: &mut World<'_>) -> Outcome {
    let (bench, grant) = (&open.bench, &plan.asked.grant);
    match id {
        Id::S02 => sample(open, plan, world),
        Id::S03 => memory::run(bench, plan.all_memory.then_some((grant, open.limit))),
        Id::S04 => matrix::run(bench),
        Id::S05 => match no_tensor(open, plan) {
            Some(reason) => Err(Problem::Skip(reason)),
            None => tensor::run(bench),
        },
        Id::S06 => copies::run(bench, &open.gpu.name),
        Id::S07 => share::run(bench, grant, open.limit, plan.isolation),
        Id::S09 if plan.isolation => accounting::run(bench, grant, open.limit, world.second),
        Id::S09 => Err(Problem::Skip("only with --isolation".to_owned())),
        Id::S01 | Id::S08 => Err(Problem::Skip("not a step of its own".to_owned())),
    }
}

/// Add vectors. For the command `vector-add`, say what the sample says.
fn sample(open: &Opened<'_>, plan: &Plan, world: &mut World<'_>) -> Outcome {
    let mut doing = "";
    let outcome = vector::run(&open.bench, &mut |note| match note {
        Note::Line(line) if plan.sample => (world.tell)(Message::Line(line)),
        Note::Line(_) => {}
        Note::Doing(what) => doing = what,
    });
    if plan.sample {
        match &outcome {
            Err(Problem::Failed(failure)) => {
                let code = codes::name(failure.code);
                let code = code.split(", ").last().unwrap_or_default();
                (world.tell)(Message::Error(format!("Failed to {doing} (error code {code})!")));
            }
            Err(Problem::Finding(finding)) => (world.tell)(Message::Error(finding.found.clone())),
            Ok(_) | Err(Problem::Skip(_)) => {}
        }
    }
    outcome
}

/// Return why the tensor cores are not tried.
fn no_tensor(open: &Opened<'_>, plan: &Plan) -> Option<String> {
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
pub(crate) fn tests_gpu(id: Id) -> bool {
    !matches!(id, Id::S07 | Id::S09)
}

/// Return the step of the report.
pub fn result(id: Id, outcome: Outcome) -> Step {
    let failed = |finding: Finding| Step {
        gpu_at_fault: finding.gpu_at_fault && tests_gpu(id),
        ..Step::fail(id, finding.found, finding.why, finding.fix)
    };
    match outcome {
        Ok(Done { found, bytes: 0, .. }) if id.compares() => failed(Finding::new(
            format!("{found}; no byte was compared"),
            "a step that compared nothing proves nothing",
            "report it with this output",
        )),
        Ok(Done {
            found,
            bytes,
            warning: Some(warning),
        }) => Step {
            bytes,
            ..Step::warn(id, format!("{}; {found}", warning.found), warning.why, warning.fix)
        },
        Ok(Done { found, bytes, .. }) => Step::pass(id, found, bytes),
        Err(Problem::Failed(failure)) => failed(codes::explain(&failure)),
        Err(Problem::Finding(finding)) => failed(finding),
        Err(Problem::Skip(reason)) => Step::skip(id, reason),
    }
}

#[cfg(test)]
mod tests {
    use divvy_smoke_report::Status;

    use super::*;

    #[test]
    fn a_step_that_compared_nothing_has_failed() {
        for id in Id::ALL {
            let step = result(id, Ok(Done::new("done", 0)));
            let expected = if id.compares() { Status::Fail } else { Status::Pass };
            assert_eq!(step.status, expected, "{id:?}");
            assert_eq!(result(id, Ok(Done::new("done", 1))), Step::pass(id, "done", 1));
        }
    }
}
