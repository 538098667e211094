//! The annotations that a run writes on a node about one of its GPUs.

use divvy_model::out_of_service::{failed_smoke, out_of_service_key, under_test_key};
use divvy_smoke_report::{SmokeOutcome, SmokeReport, StepId, StepStatus};
use serde_json::{Value, json};

use crate::{GpuVerdict, TestTarget};

/// A mark: annotations on a node about one of its GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Mark {
    /// The GPU failed, for this reason: it is out of service.
    Failed(String),
    /// The GPU is out of service, and this run tests it now.
    Testing,
    /// The GPU has passed, and is in service again.
    Passed,
}

impl Mark {
    /// Decide what to write about a GPU with this result. The GPU goes out of service only if a failure shows that it is the GPU's own, and comes back
    /// only if it passes what proves that it computes, and the step that failed before.
    pub fn of(target: &TestTarget, verdict: &GpuVerdict) -> Option<Mark> {
        let report = match verdict {
            GpuVerdict::Tested(report) => Some(report),
            _ => None,
        };
        let found = report.and_then(|report| found(report));
        let before = target.failed_before.as_ref();
        match (found, before) {
            (Some(found), _) => Some(Mark::Failed(found)),
            (None, Some(before)) => {
                if report.is_some_and(|report| passes(report, before)) {
                    Some(Mark::Passed)
                } else {
                    Some(Mark::Failed(before.clone()))
                }
            }
            (None, None) => None,
        }
    }

    /// Return whether the GPU is `in` service or `out` of it after this mark. `None` if that is not decided.
    pub(crate) fn service(&self) -> Option<&'static str> {
        match self {
            Mark::Failed(_) => Some("out"),
            Mark::Passed => Some("in"),
            Mark::Testing => None,
        }
    }

    /// Return the merge patch for the node.
    pub fn patch(&self, uuid: &str, run: &str) -> Value {
        let (out, test) = (out_of_service_key(uuid), under_test_key(uuid));
        let annotations = match self {
            Mark::Failed(found) => json!({out: failed_smoke(found), test: null}),
            Mark::Testing => json!({test: run}),
            Mark::Passed => json!({out: null, test: null}),
        };
        json!({"metadata": {"annotations": annotations}})
    }
}

/// Return the first failure that is the GPU's own.
fn found(report: &SmokeReport) -> Option<String> {
    let is_own = |status: StepStatus, gpu_at_fault: bool| status == StepStatus::Fail && gpu_at_fault;
    let step = report.steps.iter().find(|step| is_own(step.status, step.gpu_at_fault))?;
    // The reason becomes a part of sentences.
    let found = step.found.trim_end_matches(['.', '!']);
    Some(format!("{} {}: {found}", step.id.word(), step.id.title()))
}

/// Report whether a GPU passed well enough to be in service again.
fn passes(report: &SmokeReport, before: &str) -> bool {
    let failed = before.split_whitespace().next().and_then(StepId::parse);
    let needed = [StepId::S02, StepId::S03, StepId::S04].into_iter().chain(failed);
    let has_passed = |id: StepId| {
        report
            .step(id)
            .is_some_and(|step| matches!(step.status, StepStatus::Pass | StepStatus::Warn))
    };
    matches!(report.result, SmokeOutcome::Pass | SmokeOutcome::Warn) && needed.into_iter().all(has_passed)
}
