//! What the checks said.

mod text;

use serde::Serialize;

use crate::check::{Check, Finding, Group, Needs, Repair, Severity, Stop, Verdict};
use crate::facts::{Asked, Facts};

pub use text::Style;
pub(crate) use text::wrapped;

/// What became of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    /// It holds.
    Pass,
    /// It does not apply, or could not be looked at: see [`Skipped`].
    Skip,
    /// Good to know.
    Note,
    /// Something will fail.
    Warn,
    /// Something fails.
    Fail,
}

impl Status {
    fn word(self) -> &'static str {
        match self {
            Status::Pass => "PASS",
            Status::Skip => "SKIP",
            Status::Note => "NOTE",
            Status::Warn => "WARN",
            Status::Fail => "FAIL",
        }
    }

    fn colour(self) -> &'static str {
        match self {
            Status::Pass => "\x1b[32m",
            Status::Skip => "\x1b[2m",
            Status::Note => "\x1b[36m",
            Status::Warn => "\x1b[33m",
            Status::Fail => "\x1b[1;31m",
        }
    }
}

/// Why a check was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Skipped {
    /// There is nothing here that it is about, or nobody asked for it.
    DoesNotApply,
    /// It applies, and a right, a program or an answer was missing: whether it holds is not known.
    CouldNotLook,
}

/// What one check said.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Line {
    /// Of the check.
    pub id: &'static str,
    /// Of the check.
    pub title: &'static str,
    /// Of the check.
    pub group: Group,
    /// What became of it.
    pub status: Status,
    /// Why it was skipped; with SKIP.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub skipped: Option<Skipped>,
    /// What is there, or why nobody can say.
    pub found: String,
    /// Why it matters; with WARN, FAIL and NOTE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// What to type next; with WARN, FAIL and NOTE.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
    /// What `--fix` does.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub repairs: Vec<Repair>,
}

/// What all checks said.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// In the order of the chain.
    pub checks: Vec<Line>,
    /// Checks that were not asked for, since they look elsewhere.
    #[serde(rename = "notRun", skip_serializing_if = "Vec::is_empty")]
    pub not_run: Vec<&'static str>,
}

impl Report {
    /// Runs checks, one after the other.
    pub fn of(facts: &Facts<'_>, checks: &[Check]) -> Report {
        let (wanted, not_run) = Report::plan(facts, checks);
        Report {
            checks: wanted.into_iter().map(|check| Line::of(check, facts)).collect(),
            not_run,
        }
    }

    /// Which of these checks are to be run; and the ids of those that look where nobody wanted to look.
    pub fn plan<'c>(facts: &Facts<'_>, checks: &'c [Check]) -> (Vec<&'c Check>, Vec<&'static str>) {
        let cluster = !matches!(facts.cluster, Asked::Not(_));
        let (wanted, others): (Vec<&Check>, Vec<&Check>) = checks.iter().partition(|check| match check.needs {
            Needs::Node => facts.node,
            Needs::Cluster => cluster,
            Needs::Either => facts.node || cluster,
        });
        (wanted, others.into_iter().map(|check| check.id).collect())
    }

    /// 0 all is well, 1 there is a warning, 2 something fails or could not be looked at.
    pub fn exit_status(&self) -> u8 {
        let blind = self.checks.iter().any(Line::could_not_look);
        match self.checks.iter().map(|line| line.status).max() {
            Some(Status::Fail) => 2,
            _ if blind => 2,
            Some(Status::Warn) => 1,
            _ => 0,
        }
    }
}

impl Line {
    /// Whether the check applies, and nobody knows whether it holds.
    pub fn could_not_look(&self) -> bool {
        self.skipped == Some(Skipped::CouldNotLook)
    }

    /// Runs a check.
    pub fn of(check: &Check, facts: &Facts<'_>) -> Line {
        // What others could not read is theirs to tell.
        let _ = facts.tree.troubles();
        let verdict = (check.run)(facts);
        let troubles = facts.tree.troubles().join("; ");
        let verdict = match verdict {
            verdict if troubles.is_empty() => verdict,
            Ok(found) => Ok(format!("{found}; could not be read: {troubles}")),
            // What could not be read may be what was missed.
            Err(Stop::Problem(_) | Stop::Milder(..)) => Err(Stop::Blind(format!("{troubles}; run it as root"))),
            // Nor need it be absent.
            Err(Stop::Skip(reason) | Stop::Blind(reason)) => Err(Stop::Blind(format!(
                "{reason}, as far as could be seen: {troubles}; run it as root"
            ))),
        };
        Line::new(check, verdict)
    }

    /// What a check said.
    pub fn new(check: &Check, verdict: Verdict) -> Line {
        let of = |status, finding: Finding| Line {
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
        let without = |status, skipped, found| Line {
            why: None,
            fix: None,
            skipped,
            ..of(
                status,
                Finding {
                    found,
                    ..Finding::default()
                },
            )
        };
        let status = |severity| match severity {
            Severity::Error => Status::Fail,
            Severity::Warning => Status::Warn,
            Severity::Info => Status::Note,
        };
        match verdict {
            Ok(found) => without(Status::Pass, None, found),
            Err(Stop::Skip(reason)) => without(Status::Skip, Some(Skipped::DoesNotApply), reason),
            Err(Stop::Blind(reason)) => without(Status::Skip, Some(Skipped::CouldNotLook), reason),
            Err(Stop::Problem(finding)) => of(status(check.severity), finding),
            Err(Stop::Milder(severity, finding)) => of(status(severity.min(check.severity)), finding),
        }
    }
}
