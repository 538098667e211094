//! The results of the checks: one line for each check, and the report that consists of these lines.

mod text;

use serde::Serialize;

use crate::check::{Check, CheckFinding, CheckGroup, CheckStop, CheckVerdict, Needs, Repair, Severity};
use crate::facts::{Asked, Facts};

pub use text::ReportStyle;
pub(crate) use text::wrapped;

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum CheckStatus {
    /// The check passes.
    Pass,
    /// The check does not apply, or its facts could not be read. [`Skipped`] says which.
    Skip,
    /// Good to know.
    Note,
    /// Something will fail.
    Warn,
    /// Something fails.
    Fail,
}

impl CheckStatus {
    fn word(self) -> &'static str {
        match self {
            CheckStatus::Pass => "PASS",
            CheckStatus::Skip => "SKIP",
            CheckStatus::Note => "NOTE",
            CheckStatus::Warn => "WARN",
            CheckStatus::Fail => "FAIL",
        }
    }

    fn colour(self) -> &'static str {
        match self {
            CheckStatus::Pass => "\x1b[32m",
            CheckStatus::Skip => "\x1b[2m",
            CheckStatus::Note => "\x1b[36m",
            CheckStatus::Warn => "\x1b[33m",
            CheckStatus::Fail => "\x1b[1;31m",
        }
    }
}

/// The reason why a check was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Skipped {
    /// The check does not apply to this machine or cluster, or the user did not request it.
    DoesNotApply,
    /// The check applies, but a permission, a program, or an answer was missing, so its result is unknown.
    CouldNotLook,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ReportLine {
    /// The id of the check, such as `D01`.
    pub id: &'static str,
    /// The title of the check, which is a statement that is true when the check passes.
    pub title: &'static str,
    /// The link to which the check belongs, in the chain from the driver to the pods.
    pub group: CheckGroup,
    /// The outcome.
    pub status: CheckStatus,
    /// Whether the check does not apply or could not run. Present only for SKIP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skipped>,
    /// What was found, or the reason for a SKIP.
    pub found: String,
    /// Why the finding matters. Present only for WARN, FAIL, and NOTE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to type next. Present only for WARN, FAIL, and NOTE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// The repairs that `--fix` makes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub repairs: Vec<Repair>,
}

/// The results of all checks of one run.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct DoctorReport {
    /// The results, in the order of the chain from the driver to the pods.
    pub checks: Vec<ReportLine>,
    /// The ids of the checks that did not run because they need `--node` or `--cluster`, which the user did not give.
    #[serde(rename = "notRun", skip_serializing_if = "Vec::is_empty")]
    pub not_run: Vec<&'static str>,
}

impl DoctorReport {
    /// Run the checks that these facts allow, one after the other.
    pub fn of(facts: &Facts<'_>, checks: &[Check]) -> DoctorReport {
        let (wanted, not_run) = DoctorReport::plan(facts, checks);
        DoctorReport {
            checks: wanted.into_iter().map(|check| ReportLine::of(check, facts)).collect(),
            not_run,
        }
    }

    /// Split the checks into those that can run, and the ids of those that need a source (the machine or the cluster) that the
    /// user did not select.
    pub fn plan<'c>(facts: &Facts<'_>, checks: &'c [Check]) -> (Vec<&'c Check>, Vec<&'static str>) {
        let cluster = !matches!(facts.cluster, Asked::Not(_));
        let (wanted, others): (Vec<&Check>, Vec<&Check>) = checks.iter().partition(|check| match check.needs {
            Needs::Node => facts.node,
            Needs::Cluster => cluster,
            Needs::Either => facts.node || cluster,
        });
        (wanted, others.into_iter().map(|check| check.id).collect())
    }

    /// Return the exit status: 2 if a check fails or its facts could not be read, else 1 if there is a warning, else 0.
    pub fn exit_status(&self) -> u8 {
        let blind = self.checks.iter().any(ReportLine::could_not_look);
        match self.checks.iter().map(|line| line.status).max() {
            Some(CheckStatus::Fail) => 2,
            _ if blind => 2,
            Some(CheckStatus::Warn) => 1,
            _ => 0,
        }
    }
}

impl ReportLine {
    /// Report whether the check applies but its facts could not be read.
    pub fn could_not_look(&self) -> bool {
        self.skipped == Some(Skipped::CouldNotLook)
    }

    /// Run a check. If a file could not be read, a finding becomes "could not check", and the text of a pass names the file.
    pub fn of(check: &Check, facts: &Facts<'_>) -> ReportLine {
        // Drop the read errors of earlier checks: those checks have reported them.
        let _ = facts.tree.troubles();
        let verdict = (check.run)(facts);
        let troubles = facts.tree.troubles().join("; ");
        let verdict = match verdict {
            verdict if troubles.is_empty() => verdict,
            Ok(found) => Ok(format!("{found}; could not be read: {troubles}")),
            // The finding may be wrong: the file that could not be read may hold what the check missed.
            Err(CheckStop::Problem(_) | CheckStop::Milder(..)) => Err(CheckStop::Blind(format!("{troubles}; run it as root"))),
            // "Does not apply" may be wrong for the same reason.
            Err(CheckStop::Skip(reason) | CheckStop::Blind(reason)) => Err(CheckStop::Blind(format!(
                "{reason}, as far as could be read: {troubles}; run it as root"
            ))),
        };
        ReportLine::new(check, verdict)
    }

    /// Build the line of a check from its verdict.
    pub fn new(check: &Check, verdict: CheckVerdict) -> ReportLine {
        let of = |status, finding: CheckFinding| ReportLine {
            id: check.id,
            title: check.title,
            group: check.group,
            status,
            skipped: None,
            found: finding.found,
            why: Some(finding.why),
            fix: Some(finding.fix),
            repairs: finding.repairs,
        };
        let without = |status, skipped, found| ReportLine {
            why: None,
            fix: None,
            skipped,
            ..of(
                status,
                CheckFinding {
                    found,
                    ..CheckFinding::default()
                },
            )
        };
        let status = |severity| match severity {
            Severity::Error => CheckStatus::Fail,
            Severity::Warning => CheckStatus::Warn,
            Severity::Info => CheckStatus::Note,
        };
        match verdict {
            Ok(found) => without(CheckStatus::Pass, None, found),
            Err(CheckStop::Skip(reason)) => without(CheckStatus::Skip, Some(Skipped::DoesNotApply), reason),
            Err(CheckStop::Blind(reason)) => without(CheckStatus::Skip, Some(Skipped::CouldNotLook), reason),
            Err(CheckStop::Problem(finding)) => of(status(check.severity), finding),
            Err(CheckStop::Milder(severity, finding)) => of(status(severity.min(check.severity)), finding),
        }
    }
}
