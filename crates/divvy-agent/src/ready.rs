//! Why the agent is not ready: `/readyz` names the parts, and the log has the reasons.

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

    /// The parts that are not ready now.
    pub(crate) fn parts(&self) -> Vec<&'static str> {
        let now = Instant::now();
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        let current = reasons.iter().filter(|(_, (_, until))| until.is_none_or(|until| until > now));
        current.map(|(part, _)| *part).collect()
    }

    fn insert(&self, part: &'static str, reason: String, until: Option<Instant>) {
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        if reasons.get(part).is_none_or(|(known, _)| *known != reason) {
            tracing::info!(part, reason, "not ready");
        }
        reasons.insert(part, (reason, until));
    }
}
