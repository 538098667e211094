//! What a run of `divvy-smoke` found on one GPU.
//!
//! - [`SmokeReport`]: the steps and the result, as JSON ([`SmokeReport::json`]), as lines for people ([`SmokeReport::text`]), as an exit status
//!   ([`SmokeOutcome::exit_status`]), and as a pod's termination message ([`SmokeReport::termination_message`]).
//! - [`SmokeReport::read`]: the same from JSON of unknown origin: a tenant can write the termination message of its pod.

#![forbid(unsafe_code)]

mod cut;
mod read;
mod step;
mod text;

use serde::{Deserialize, Serialize};

pub use cut::TERMINATION_MESSAGE;
pub use read::{MOST_BYTES, MOST_TEXT, ReportError};
pub use step::{SmokeStep, StepId, StepStatus};

/// The version of the programs that write and read the same reports.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The result of a run.
///
/// The order is that of severity: a run has the worst result of its steps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum SmokeOutcome {
    /// No step could be tried: there is no GPU, or not enough of it.
    Skip,
    /// Every step passed or was skipped with a reason, and at least one passed.
    Pass,
    /// A step has a warning, and none failed.
    Warn,
    /// A step failed.
    Fail,
}

impl SmokeOutcome {
    /// Return the result of these steps.
    pub fn of(steps: &[SmokeStep]) -> SmokeOutcome {
        let worst = steps.iter().map(SmokeStep::outcome).max();
        worst.unwrap_or(SmokeOutcome::Skip)
    }

    /// Return the exit status: 0 passed, 1 a warning, 2 failed, 3 could not be tried.
    pub fn exit_status(self) -> u8 {
        match self {
            SmokeOutcome::Pass => 0,
            SmokeOutcome::Warn => 1,
            SmokeOutcome::Fail => 2,
            SmokeOutcome::Skip => 3,
        }
    }

    /// Return the word for people and in JSON.
    pub fn word(self) -> &'static str {
        match self {
            SmokeOutcome::Skip => "SKIP",
            SmokeOutcome::Pass => "PASS",
            SmokeOutcome::Warn => "WARN",
            SmokeOutcome::Fail => "FAIL",
        }
    }
}

/// The GPU, as the driver describes it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TestedGpu {
    /// The UUID, such as `GPU-8f0a…` or `MIG-…`.
    pub uuid: String,
    /// The model's name.
    pub name: String,
    /// The compute capability, such as `9.0`.
    pub cc: String,
    /// The path of the driver's library.
    pub driver: String,
    /// The driver's version of CUDA, such as `13.0`.
    pub cuda: String,
    /// The memory that the driver shows, in bytes. In a container with the guard, it is the share.
    pub memory: u64,
}

/// What a run found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SmokeReport {
    /// The version of the program that wrote this. Another version's report is refused.
    pub version: String,
    /// The name of the node, if the program was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<String>,
    /// The name of the pod, if the program was told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod: Option<String>,
    /// The GPU, if the driver described one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gpu: Option<TestedGpu>,
    /// The steps, in their order.
    pub steps: Vec<SmokeStep>,
    /// How many steps were left out because the text would have been too long.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub cut: u64,
    /// The result of all steps.
    pub result: SmokeOutcome,
}

impl SmokeReport {
    /// Return the report of these steps.
    pub fn new(gpu: Option<TestedGpu>, steps: Vec<SmokeStep>) -> SmokeReport {
        SmokeReport {
            version: VERSION.to_owned(),
            node: None,
            pod: None,
            gpu,
            result: SmokeOutcome::of(&steps),
            steps,
            cut: 0,
        }
    }

    /// Return the step with this id.
    pub fn step(&self, id: StepId) -> Option<&SmokeStep> {
        self.steps.iter().find(|step| step.id == id)
    }

    /// Return the report as one line of JSON.
    pub fn json(&self) -> String {
        serde_json::to_string(self).unwrap_or_else(|error| format!("{{\"error\":{:?}}}", error.to_string()))
    }
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u64) -> bool {
    *number == 0
}
