//! One step of a run.

use serde::{Deserialize, Serialize};

use crate::SmokeOutcome;

/// The id of a step. An id is never used for another step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum StepId {
    /// The driver's library, its version, and the GPU.
    S01,
    /// A vector addition.
    S02,
    /// Patterns in the memory.
    S03,
    /// Products of matrices.
    S04,
    /// The tensor cores.
    S05,
    /// Copies to and from the GPU.
    S06,
    /// The share of the memory.
    S07,
    /// The GPU's health, from the probe.
    S08,
    /// Two processes within one share.
    S09,
}

impl StepId {
    /// All steps, in their order.
    pub const ALL: [StepId; 9] = [
        StepId::S01,
        StepId::S02,
        StepId::S03,
        StepId::S04,
        StepId::S05,
        StepId::S06,
        StepId::S07,
        StepId::S08,
        StepId::S09,
    ];

    /// Return the id as text.
    pub fn word(self) -> &'static str {
        ["S01", "S02", "S03", "S04", "S05", "S06", "S07", "S08", "S09"][self as usize]
    }

    /// Return what the step looks at.
    pub fn title(self) -> &'static str {
        [
            "driver",
            "vector add",
            "memory",
            "matrix",
            "tensor cores",
            "copies",
            "share",
            "health",
            "accounting",
        ][self as usize]
    }

    /// Return the step with this id, or with this title.
    pub fn parse(text: &str) -> Option<StepId> {
        StepId::ALL
            .into_iter()
            .find(|id| id.word().eq_ignore_ascii_case(text) || id.title().eq_ignore_ascii_case(text))
    }

    /// Report whether the step compares results. Such a step does not pass unless it compared at least one byte.
    pub fn compares(self) -> bool {
        matches!(self, StepId::S02 | StepId::S03 | StepId::S04 | StepId::S05 | StepId::S06)
    }
}

/// The outcome of a step, in the words of `divvy doctor`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum StepStatus {
    /// The step was done, and everything was as it should be.
    Pass,
    /// The step was not done. `found` says why.
    Skip,
    /// Something is not as it should be, and programs still compute correctly.
    Warn,
    /// Something fails.
    Fail,
}

impl StepStatus {
    /// Return the word for people and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            StepStatus::Pass => "PASS",
            StepStatus::Skip => "SKIP",
            StepStatus::Warn => "WARN",
            StepStatus::Fail => "FAIL",
        }
    }
}

/// The result of one step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmokeStep {
    /// The id.
    pub id: StepId,
    /// The outcome.
    pub status: StepStatus,
    /// What was found, or the reason for a SKIP.
    pub found: String,
    /// Why it matters. Present only for WARN and FAIL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to do next. Present only for WARN and FAIL.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// How long the step took, in milliseconds.
    pub ms: u64,
    /// How many bytes of results were compared with what they must be.
    pub bytes: u64,
    /// Whether the failure shows that the GPU itself is at fault, and not the installation or the share. True only for FAIL.
    #[serde(default, rename = "gpuAtFault", skip_serializing_if = "std::ops::Not::not")]
    pub gpu_at_fault: bool,
}

impl SmokeStep {
    /// A step that passed, after it compared so many bytes.
    pub fn pass(id: StepId, found: impl Into<String>, bytes: u64) -> SmokeStep {
        SmokeStep {
            id,
            status: StepStatus::Pass,
            found: found.into(),
            why: None,
            fix: None,
            ms: 0,
            bytes,
            gpu_at_fault: false,
        }
    }

    /// A step that was not done, and the reason.
    pub fn skip(id: StepId, reason: impl Into<String>) -> SmokeStep {
        SmokeStep {
            status: StepStatus::Skip,
            ..SmokeStep::pass(id, reason, 0)
        }
    }

    /// A step with a warning.
    pub fn warn(id: StepId, found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> SmokeStep {
        SmokeStep {
            status: StepStatus::Warn,
            ..SmokeStep::fail(id, found, why, fix)
        }
    }

    /// A step that failed.
    pub fn fail(id: StepId, found: impl Into<String>, why: impl Into<String>, fix: impl Into<String>) -> SmokeStep {
        SmokeStep {
            status: StepStatus::Fail,
            why: Some(why.into()),
            fix: Some(fix.into()),
            ..SmokeStep::pass(id, found, 0)
        }
    }

    /// Return what this step makes of the run. A step that passed without having compared anything has failed.
    pub(crate) fn outcome(&self) -> SmokeOutcome {
        match self.status {
            StepStatus::Fail => SmokeOutcome::Fail,
            StepStatus::Pass if self.id.compares() && self.bytes == 0 => SmokeOutcome::Fail,
            StepStatus::Warn => SmokeOutcome::Warn,
            StepStatus::Pass => SmokeOutcome::Pass,
            StepStatus::Skip => SmokeOutcome::Skip,
        }
    }
}
