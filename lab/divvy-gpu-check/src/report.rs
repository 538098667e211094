//! The report: `report.md` for people, `report.json` for programs. Both are replaced after each step, so that a run that is cut short has what it did.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::json;

use crate::checks::Check;
use crate::driver::CheckedDriver;
use crate::findings::{FindingStatus, GpuCheckFindings, MeasuredRow};

/// A check in the report.
#[derive(Debug, Serialize)]
struct GpuCheckEntry {
    name: &'static str,
    about: &'static str,
    status: FindingStatus,
    seconds: f64,
    #[serde(flatten)]
    findings: GpuCheckFindings,
}

/// The report of a run.
#[derive(Debug)]
pub(crate) struct GpuCheckReport {
    directory: PathBuf,
    /// Which driver and which GPU.
    subject: String,
    began: u64,
    is_complete: bool,
    entries: Vec<GpuCheckEntry>,
}

impl GpuCheckReport {
    /// Begin a report in a directory, which is made if it does not exist.
    pub(crate) fn create(directory: &Path, driver: &CheckedDriver) -> Result<GpuCheckReport> {
        fs::create_dir_all(directory)
            .with_context(|| format!("--report {}: the directory cannot be made", directory.display()))?;
        let began = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let report = GpuCheckReport {
            directory: directory.to_owned(),
            subject: driver.subject(),
            began,
            is_complete: false,
            entries: Vec::new(),
        };
        report.write()?;
        Ok(report)
    }

    /// A check begins. Return a line about it.
    pub(crate) fn begin(&mut self, check: Check) -> Result<String> {
        self.entries.push(GpuCheckEntry {
            name: check.name(),
            about: check.about(),
            status: FindingStatus::Running,
            seconds: 0.0,
            findings: GpuCheckFindings::default(),
        });
        self.write()?;
        Ok(format!("{}: {}", check.name(), check.about()))
    }

    /// A check ended. Return what it found as text.
    pub(crate) fn end(&mut self, check: Check, findings: GpuCheckFindings, took: Duration) -> Result<String> {
        self.entries.pop();
        let entry = GpuCheckEntry {
            name: check.name(),
            about: check.about(),
            status: findings.status(),
            seconds: (took.as_secs_f64() * 10.0).round() / 10.0,
            findings,
        };
        let mut text = format!("  {} in {} s", word(entry.status), entry.seconds);
        for failure in &entry.findings.failures {
            let _ = write!(text, "\n  {failure}");
        }
        for skipped in &entry.findings.skipped {
            let _ = write!(text, "\n  skipped: {skipped}");
        }
        self.entries.push(entry);
        self.write()?;
        Ok(text)
    }

    /// All checks have ended.
    pub(crate) fn complete(&mut self) -> Result<()> {
        self.is_complete = true;
        self.write()
    }

    pub(crate) fn statuses(&self) -> impl Iterator<Item = FindingStatus> {
        self.entries.iter().map(|entry| entry.status)
    }

    /// Return how many checks ended in which way, and where the report is.
    pub(crate) fn summary(&self) -> String {
        let count = |wanted| self.statuses().filter(|status| *status == wanted).count();
        format!(
            "{} passed, {} failed, {} skipped: {}",
            count(FindingStatus::Pass),
            count(FindingStatus::Fail),
            count(FindingStatus::Skipped),
            self.directory.join("report.md").display()
        )
    }

    fn write(&self) -> Result<()> {
        let json = json!({
            "v": 1,
            "subject": self.subject,
            "began": self.began,
            "complete": self.is_complete,
            "checks": self.entries,
        });
        self.replace("report.json", &serde_json::to_string_pretty(&json)?)?;
        self.replace("report.md", &self.text())
    }

    fn replace(&self, name: &str, text: &str) -> Result<()> {
        let (path, next) = (self.directory.join(name), self.directory.join(format!("{name}.next")));
        fs::write(&next, text)
            .and_then(|()| fs::rename(&next, &path))
            .with_context(|| format!("{} cannot be written", path.display()))
    }

    fn text(&self) -> String {
        let mut text = format!("# GPU checks\n\n{}\n", self.subject);
        if !self.is_complete {
            text.push_str("\nThe run is not complete.\n");
        }
        text.push_str("\n| check | result | s |\n|---|---|---|\n");
        for entry in &self.entries {
            let _ = writeln!(
                text,
                "| [{0}](#{0}) | {1} | {2} |",
                entry.name,
                word(entry.status),
                entry.seconds
            );
        }
        for entry in &self.entries {
            let _ = write!(text, "\n## {}\n\n{}. {}.\n", entry.name, entry.about, word(entry.status));
            for failure in &entry.findings.failures {
                let _ = write!(text, "\n- FAIL: {failure}");
            }
            for skipped in &entry.findings.skipped {
                let _ = write!(text, "\n- SKIPPED: {skipped}");
            }
            if !(entry.findings.failures.is_empty() && entry.findings.skipped.is_empty()) {
                text.push('\n');
            }
            text.push_str(&table(&entry.findings.rows));
        }
        text
    }
}

fn word(status: FindingStatus) -> &'static str {
    match status {
        FindingStatus::Running => "RUNNING",
        FindingStatus::Pass => "PASS",
        FindingStatus::Fail => "FAIL",
        FindingStatus::Skipped => "SKIPPED",
    }
}

/// Return the rows as two tables: one of values, one of comparisons.
fn table(rows: &[MeasuredRow]) -> String {
    let cell = |text: &Option<String>| text.clone().unwrap_or_default().replace('|', "\\|").replace('\n', " ");
    let mut text = String::new();
    let (values, pairs): (Vec<&MeasuredRow>, Vec<&MeasuredRow>) = rows.iter().partition(|row| row.value.is_some());
    if !values.is_empty() {
        text.push_str("\n| | |\n|---|---|\n");
    }
    for row in values {
        let _ = writeln!(text, "| {} | {} |", row.what, cell(&row.value));
    }
    if !pairs.is_empty() {
        text.push_str("\n| | with the guard | without |\n|---|---|---|\n");
    }
    for row in pairs {
        let _ = writeln!(
            text,
            "| {} | {} | {} |",
            row.what,
            cell(&row.with_guard),
            cell(&row.without_guard)
        );
    }
    text
}
