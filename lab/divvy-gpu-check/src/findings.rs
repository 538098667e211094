//! What a check has found.

use serde::Serialize;
use serde_json::{Map, Value};

/// How a check ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub(crate) enum FindingStatus {
    Running,
    Pass,
    Fail,
    Skipped,
}

/// A measured value, or one with the guard and one without it.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct MeasuredRow {
    pub(crate) what: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) value: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) with_guard: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) without_guard: Option<String>,
}

/// What a check has found. It is complete up to the moment at which a check is stopped.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct GpuCheckFindings {
    pub(crate) rows: Vec<MeasuredRow>,
    /// What is not as it should be.
    pub(crate) failures: Vec<String>,
    /// What was not checked, and why.
    pub(crate) skipped: Vec<String>,
    /// Raw data.
    #[serde(skip_serializing_if = "Map::is_empty")]
    pub(crate) raw: Map<String, Value>,
    has_checked: bool,
}

impl GpuCheckFindings {
    /// Add a value.
    pub(crate) fn value(&mut self, what: impl Into<String>, value: impl ToString) {
        self.rows.push(MeasuredRow {
            what: what.into(),
            value: Some(value.to_string()),
            with_guard: None,
            without_guard: None,
        });
    }

    /// Add what was measured with the guard, and without it.
    pub(crate) fn both(&mut self, what: impl Into<String>, with: impl ToString, without: impl ToString) {
        self.rows.push(MeasuredRow {
            what: what.into(),
            value: None,
            with_guard: Some(with.to_string()),
            without_guard: Some(without.to_string()),
        });
    }

    /// Add a failure unless this is so.
    pub(crate) fn expect(&mut self, holds: bool, text: impl FnOnce() -> String) {
        self.has_checked = true;
        if !holds {
            self.failures.push(text());
        }
    }

    /// Add what was not checked.
    pub(crate) fn skip(&mut self, text: impl Into<String>) {
        self.skipped.push(text.into());
    }

    /// Return how the check ended. A check that only measures passes if it has measured everything.
    pub(crate) fn status(&self) -> FindingStatus {
        let has_measured = !self.rows.is_empty() && self.skipped.is_empty();
        match self.failures.is_empty() {
            false => FindingStatus::Fail,
            true if self.has_checked || has_measured => FindingStatus::Pass,
            true => FindingStatus::Skipped,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A check that found nothing is skipped.
    #[test]
    fn one_failure_is_enough_to_fail_a_check() {
        let mut findings = GpuCheckFindings::default();
        assert_eq!(findings.status(), FindingStatus::Skipped);
        findings.value("a", 1);
        assert_eq!(findings.status(), FindingStatus::Pass);
        findings.skip("there is no torch");
        assert_eq!(findings.status(), FindingStatus::Skipped);
        findings.expect(true, || "never".to_owned());
        assert_eq!(findings.status(), FindingStatus::Pass);
        findings.expect(false, || "it is not so".to_owned());
        findings.expect(true, || "never".to_owned());
        assert_eq!(
            (findings.status(), &findings.failures[..]),
            (FindingStatus::Fail, &["it is not so".to_owned()][..])
        );
    }
}
