//! Reads a report of unknown origin.

use std::collections::BTreeSet;

use crate::{SmokeOutcome, SmokeReport, StepId, StepStatus, VERSION};

/// The size of the largest report that is read, in bytes.
pub const MOST_BYTES: usize = 64 << 10;
/// The size of the longest text in a report, in bytes.
pub const MOST_TEXT: usize = 4096;

/// The reason why a report is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// It is longer than [`MOST_BYTES`].
    #[error("the report of divvy-smoke has {0} bytes, and at most {MOST_BYTES} are read")]
    TooLong(usize),
    /// It is not JSON, or not that of a report.
    #[error("this is not a report of divvy-smoke: {0}")]
    Malformed(String),
    /// Another version wrote it.
    #[error("the report is from divvy-smoke {0}, and this is {VERSION}; run both from the same image")]
    OtherVersion(String),
    /// A text is longer than [`MOST_TEXT`].
    #[error("a text in the report has more than {MOST_TEXT} bytes")]
    LongText,
    /// A step is there twice.
    #[error("the report has the step {} twice", .0.word())]
    Twice(StepId),
    /// A step that did not fail says that the GPU is at fault.
    #[error("the step {} says that the GPU is at fault, and has not failed", .0.word())]
    NoFault(StepId),
    /// The result is not that of the steps.
    #[error("the report says {}, and its steps say {}", .said.word(), .steps.word())]
    Contradiction {
        /// The result that the report has.
        said: SmokeOutcome,
        /// The result of its steps.
        steps: SmokeOutcome,
    },
}

/// The part of each version's report.
#[derive(serde::Deserialize)]
struct Versioned {
    version: String,
}

impl SmokeReport {
    /// Read a report from JSON.
    pub fn read(text: &str) -> Result<SmokeReport, ReportError> {
        if text.len() > MOST_BYTES {
            return Err(ReportError::TooLong(text.len()));
        }
        let malformed = |error: serde_json::Error| ReportError::Malformed(error.to_string());
        let Versioned { version } = serde_json::from_str(text).map_err(malformed)?;
        if version != VERSION {
            return Err(ReportError::OtherVersion(version.chars().take(40).collect()));
        }
        let report: SmokeReport = serde_json::from_str(text).map_err(malformed)?;
        report.check()?;
        Ok(report)
    }

    fn check(&self) -> Result<(), ReportError> {
        let gpu = self
            .gpu
            .iter()
            .flat_map(|gpu| [&gpu.uuid, &gpu.name, &gpu.cc, &gpu.driver, &gpu.cuda]);
        let steps = self
            .steps
            .iter()
            .flat_map(|step| [Some(&step.found), step.why.as_ref(), step.fix.as_ref()]);
        let mut texts = steps.chain([self.node.as_ref(), self.pod.as_ref()]).flatten().chain(gpu);
        if texts.any(|text| text.len() > MOST_TEXT) {
            return Err(ReportError::LongText);
        }
        let mut seen = BTreeSet::new();
        if let Some(step) = self.steps.iter().find(|step| !seen.insert(step.id)) {
            return Err(ReportError::Twice(step.id));
        }
        if let Some(step) = self
            .steps
            .iter()
            .find(|step| step.gpu_at_fault && step.status != StepStatus::Fail)
        {
            return Err(ReportError::NoFault(step.id));
        }
        let steps = SmokeOutcome::of(&self.steps);
        // Steps that were left out may have made the result worse, never better.
        let agrees = if self.cut == 0 {
            self.result == steps
        } else {
            self.result >= steps
        };
        if agrees {
            Ok(())
        } else {
            Err(ReportError::Contradiction {
                said: self.result,
                steps,
            })
        }
    }
}
