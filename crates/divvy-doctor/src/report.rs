//! What the checks said.

use std::fmt::Write as _;

use divvy_container::plain;
use serde::Serialize;

use crate::check::{Check, Finding, Group, Needs, Repair, Severity, Stop, Verdict};
use crate::facts::{Asked, Facts};

/// What became of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Status {
    /// It holds.
    Pass,
    /// It does not apply, or could not be looked at.
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

    /// 0 all is well, 1 there is a warning, 2 something fails.
    pub fn exit_status(&self) -> u8 {
        match self.checks.iter().map(|line| line.status).max() {
            Some(Status::Fail) => 2,
            Some(Status::Warn) => 1,
            _ => 0,
        }
    }

    /// For people: a line for each check, under the headings of the chain.
    pub fn text(&self, coloured: bool) -> String {
        let (bold, off) = if coloured { ("\x1b[1m", "\x1b[0m") } else { ("", "") };
        let mut text = String::new();
        let mut group = None;
        for line in &self.checks {
            if group != Some(line.group) {
                let gap = if group.is_some() { "\n" } else { "" };
                group = Some(line.group);
                let _ = writeln!(text, "{gap}{bold}{}{off}", line.group.title());
            }
            let colour = if coloured { line.status.colour() } else { "" };
            let (word, id, title) = (line.status.word(), line.id, line.title);
            match (&line.why, &line.fix) {
                (Some(why), Some(fix)) => {
                    let _ = writeln!(text, "{colour}{word}{off} {id} {title}");
                    for (name, value) in [("found", &line.found), ("why", why), ("fix", fix)] {
                        let _ = writeln!(text, "       {name:<6} {}", shown(value));
                    }
                }
                _ if line.status == Status::Skip => {
                    let _ = writeln!(text, "{colour}{word} {id} {title}: {}{off}", shown(&line.found));
                }
                _ => {
                    let _ = writeln!(text, "{colour}{word}{off} {id} {title}: {}", shown(&line.found));
                }
            }
        }
        let _ = write!(text, "\n{}", self.summary());
        text
    }

    /// How many of each, and what was not looked at.
    pub fn summary(&self) -> String {
        let count = |status: Status| self.checks.iter().filter(|line| line.status == status).count();
        let mut parts = vec![format!("{} passed", count(Status::Pass))];
        for (status, words) in [
            (Status::Fail, "failed"),
            (Status::Warn, "with a warning"),
            (Status::Note, "with a note"),
            (Status::Skip, "skipped"),
        ] {
            match count(status) {
                0 => {}
                n => parts.push(format!("{n} {words}")),
            }
        }
        let mut text = format!("{}.\n", parts.join(", "));
        if !self.not_run.is_empty() {
            let _ = writeln!(text, "Not asked for: {}.", self.not_run.join(" "));
        }
        text
    }
}

/// What files, programs and objects say is not this program's own: it neither moves a terminal's cursor nor looks like a line of the report.
fn shown(text: &str) -> String {
    plain(text).replace('\n', "\n              ")
}

impl Line {
    /// Runs a check.
    pub fn of(check: &Check, facts: &Facts<'_>) -> Line {
        // What others could not read is theirs to tell.
        let _ = facts.tree.troubles();
        let verdict = (check.run)(facts);
        let troubles = facts.tree.troubles();
        let verdict = match verdict {
            // What could not be read may be what was missed.
            Err(Stop::Problem(_) | Stop::Milder(..)) if !troubles.is_empty() => Err(Stop::Skip(format!(
                "could not be looked at: {}; run it as root",
                troubles.join("; ")
            ))),
            // Nor may it be absent.
            Err(Stop::Skip(reason)) if !troubles.is_empty() => Err(Stop::Skip(format!(
                "{reason}, as far as it could be looked at: {}",
                troubles.join("; ")
            ))),
            verdict => verdict,
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
            found: finding.found,
            why: Some(finding.why),
            fix: Some(finding.fix),
            repairs: finding.repairs,
        };
        let without = |status, found| Line {
            why: None,
            fix: None,
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
            Ok(found) => without(Status::Pass, found),
            Err(Stop::Skip(reason)) => without(Status::Skip, reason),
            Err(Stop::Problem(finding)) => of(status(check.severity), finding),
            Err(Stop::Milder(severity, finding)) => of(status(severity.min(check.severity)), finding),
        }
    }
}
