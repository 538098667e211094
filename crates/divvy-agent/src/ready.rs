//! Why the agent is not ready: `/readyz` names the parts, and the log has the reasons.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// What stands in the way, by the part of the agent that says so.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    reasons: Mutex<BTreeMap<&'static str, String>>,
}

impl Readiness {
    /// This part is not ready until it says otherwise.
    pub(crate) fn set(&self, part: &'static str, reason: impl Into<String>) {
        let reason = reason.into();
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        if reasons.get(part).is_none_or(|known| *known != reason) {
            tracing::info!(part, reason, "not ready");
        }
        reasons.insert(part, reason);
    }

    /// This part is ready.
    pub(crate) fn clear(&self, part: &'static str) {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).remove(part);
    }

    /// The parts that are not ready now.
    pub(crate) fn parts(&self) -> Vec<&'static str> {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.keys().copied().collect()
    }
}
