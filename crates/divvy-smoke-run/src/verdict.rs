//! What became of one GPU.

use divvy_smoke_report::{Outcome, Report};

/// What became of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The program ran and reported.
    Tested(Box<Report>),
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

impl Verdict {
    pub(crate) fn untried(reason: impl Into<String>) -> Verdict {
        Verdict::Untried {
            reason: reason.into(),
            explanation: None,
        }
    }

    /// Return the word in the table and in JSON.
    pub fn word(&self) -> &'static str {
        match self {
            _ if self.is_unknown() => "ERROR",
            Verdict::Tested(report) => report.result.word(),
            Verdict::Skipped(_) | Verdict::Untried { .. } => Outcome::Skip.word(),
            Verdict::Broken { .. } => Outcome::Fail.word(),
        }
    }

    /// Report whether the GPU should have been tried, and was not.
    fn is_unknown(&self) -> bool {
        match self {
            // The container found no GPU that it could try, although its pod has one.
            Verdict::Tested(report) => report.result == Outcome::Skip,
            Verdict::Untried { .. } => true,
            Verdict::Broken { .. } | Verdict::Skipped(_) => false,
        }
    }
}
