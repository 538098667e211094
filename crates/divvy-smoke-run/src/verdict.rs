//! What became of one GPU.

use divvy_smoke_report::{SmokeOutcome, SmokeReport};

/// What became of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuVerdict {
    /// The program ran and reported.
    Tested(Box<SmokeReport>),
    /// The GPU does not work, although no report says so.
    Broken {
        /// What was found.
        found: String,
        /// Why it matters.
        why: String,
        /// What to type next.
        fix: String,
    },
    /// There is nothing to try, for this reason. It is no fault.
    Skipped(String),
    /// The GPU could not be tried.
    Untried {
        /// The reason.
        reason: String,
        /// What `divvy why` says about the pod, or what was tried.
        explanation: Option<String>,
    },
}

impl GpuVerdict {
    pub(crate) fn untried(reason: impl Into<String>) -> GpuVerdict {
        GpuVerdict::Untried {
            reason: reason.into(),
            explanation: None,
        }
    }

    /// Return the word in the table and in JSON.
    pub fn word(&self) -> &'static str {
        match self {
            _ if self.is_unknown() => "ERROR",
            GpuVerdict::Tested(report) => report.result.word(),
            GpuVerdict::Skipped(_) | GpuVerdict::Untried { .. } => SmokeOutcome::Skip.word(),
            GpuVerdict::Broken { .. } => SmokeOutcome::Fail.word(),
        }
    }

    /// Report whether the GPU should have been tried, and was not.
    fn is_unknown(&self) -> bool {
        match self {
            // The container found no GPU that it could try, although its pod has one.
            GpuVerdict::Tested(report) => report.result == SmokeOutcome::Skip,
            GpuVerdict::Untried { .. } => true,
            GpuVerdict::Broken { .. } | GpuVerdict::Skipped(_) => false,
        }
    }
}
