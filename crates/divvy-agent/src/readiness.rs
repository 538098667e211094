//! Why the agent is not ready: `/readyz` names the parts, and the log has the reasons.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The reasons why the agent is not ready, by the part of the agent that reported them.
#[derive(Debug, Default)]
pub(crate) struct Readiness {
    reasons: Mutex<BTreeMap<Cow<'static, str>, String>>,
}

impl Readiness {
    /// Mark a part as not ready until it is cleared. A new reason is logged.
    pub(crate) fn set(&self, part: impl Into<Cow<'static, str>>, reason: impl Into<String>) {
        let (part, reason) = (part.into(), reason.into());
        let mut reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        if reasons.get(&part).is_none_or(|known| *known != reason) {
            tracing::info!(%part, reason, "not ready");
        }
        reasons.insert(part, reason);
    }

    /// Mark a part as ready.
    pub(crate) fn clear(&self, part: &str) {
        self.reasons.lock().unwrap_or_else(PoisonError::into_inner).remove(part);
    }

    /// Return the names of the parts that are not ready, in alphabetical order.
    pub(crate) fn parts(&self) -> Vec<Cow<'static, str>> {
        let reasons = self.reasons.lock().unwrap_or_else(PoisonError::into_inner);
        reasons.keys().cloned().collect()
    }
}
