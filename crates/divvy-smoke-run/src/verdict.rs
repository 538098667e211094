//! What became of one GPU.

use divvy_smoke_report::{Outcome, Report};

/// What became of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The program ran and reported.
    Tested(Report),
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
            Verdict::Tested(report) => report.result.word(),
            Verdict::Broken { .. } => Outcome::Fail.word(),
            Verdict::Skipped(_) => Outcome::Skip.word(),
            Verdict::Untried { .. } => "ERROR",
        }
    }

    /// Report whether the GPU failed.
    pub fn has_failed(&self) -> bool {
        match self {
            Verdict::Tested(report) => report.result == Outcome::Fail,
            Verdict::Broken { .. } => true,
            Verdict::Skipped(_) | Verdict::Untried { .. } => false,
        }
    }

    /// Report whether the GPU should have been tried, and was not.
    pub fn is_unknown(&self) -> bool {
        match self {
            Verdict::Tested(report) => report.result == Outcome::Skip,
            Verdict::Untried { .. } => true,
            Verdict::Broken { .. } | Verdict::Skipped(_) => false,
        }
    }
}
