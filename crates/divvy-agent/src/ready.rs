//! Why the agent is not ready, in words: what `/readyz` shows.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What stands in the way, by the part of the agent that says so.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    reasons: Mutex<BTreeMap<&'static str, (String, Option<Instant>)>>,
}

impl Readiness {
    /// This part is not ready until it says otherwise.
    pub(crate) fn set(&self, part: &'static str, reason: impl Into<String>) {
        self.insert(part, reason.into(), None);
    }

    /// This part had a trouble that nothing will say the end of: it counts for this long.
    pub(crate) fn set_for(&self, part: &'static str, reason: impl Into<String>, time: Duration) {
        self.insert(part, reason.into(), Instant::now().checked_add(time));
    }

    /// This part is ready.
    pub(crate) fn clear(&self, part: &'static str) {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).remove(part);
    }

    /// What stands in the way now, a line each; empty when ready.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let now = Instant::now();
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let current = reasons.iter().filter(|(_, (_, until))| until.is_none_or(|until| until > now));
        current.map(|(part, (reason, _))| format!("{part}: {reason}")).collect()
    }

    fn insert(&self, part: &'static str, reason: String, until: Option<Instant>) {
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.insert(part, (reason, until));
    }
}
