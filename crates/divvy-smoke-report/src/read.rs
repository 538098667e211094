//! Reads a report of unknown origin.

use std::collections::BTreeSet;

use crate::{Id, Outcome, Report, Status, VERSION};

/// The size of the largest report that is read, in bytes.
pub const MOST_BYTES: usize = 64 << 10;
/// The size of the longest text in a report, in bytes.
pub const MOST_TEXT: usize = 4096;

/// The reason why a report is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
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
    Twice(Id),
    /// A step that did not fail says that the GPU is at fault.
    #[error("the step {} says that the GPU is at fault, and has not failed", .0.word())]
    NoFault(Id),
    /// The result is not that of the steps.
    #[error("the report says {}, and its steps say {}", .said.word(), .steps.word())]
    Contradiction {
        /// The result that the report has.
        said: Outcome,
        /// The result of its steps.
        steps: Outcome,
    },
}

/// The part of each version's report.
#[derive(serde::Deserialize)]
struct Versioned {
    version: String,
}

impl Report {
    /// Read a report from JSON.
    pub fn read(text: &str) -> Result<Report, Error> {
        if text.len() > MOST_BYTES {
            return Err(Error::TooLong(text.len()));
        }
        let malformed = |error: serde_json::Error| Error::Malformed(error.to_string());
        let Versioned { version } = serde_json::from_str(text).map_err(malformed)?;
        if version != VERSION {
            return Err(Error::OtherVersion(version.chars().take(40).collect()));
        }
        let report: Report = serde_json::from_str(text).map_err(malformed)?;
        report.check()?;
        Ok(report)
    }

    fn check(&self) -> Result<(), Error> {
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
            return Err(Error::LongText);
        }
        let mut seen = BTreeSet::new();
        if let Some(step) = self.steps.iter().find(|step| !seen.insert(step.id)) {
            return Err(Error::Twice(step.id));
        }
        if let Some(step) = self
            .steps
            .iter()
            .find(|step| step.gpu_at_fault && step.status != Status::Fail)
        {
            return Err(Error::NoFault(step.id));
        }
        let steps = Outcome::of(&self.steps);
        // Steps that were left out may have made the result worse, never better.
        let agrees = if self.cut == 0 {
            self.result == steps
        } else {
            self.result >= steps
        };
        if agrees {
            Ok(())
        } else {
            Err(Error::Contradiction {
                said: self.result,
                steps,
            })
        }
    }
}
