//! What the agent knows, shared by its tasks.

use std::collections::BTreeSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

use divvy_agent_core::AgentCore;

/// The agent's knowledge and its decisions.
pub(crate) struct SharedCore(Mutex<AgentCore>);

impl SharedCore {
    pub(crate) fn new(core: AgentCore) -> SharedCore {
        SharedCore(Mutex::new(core))
    }

    /// Lock the core. Hold the lock only briefly: no I/O, no waiting.
    pub(crate) fn lock(&self) -> MutexGuard<'_, AgentCore> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Return the UUIDs of the GPUs on which a container has a grant.
    pub(crate) fn granted_gpus(&self) -> BTreeSet<String> {
        let core = self.lock();
        let shares = core.records().flat_map(|record| &record.container_gpus);
        let uuids: BTreeSet<&str> = shares.map(|share| share.uuid.as_str()).collect();
        uuids.into_iter().map(str::to_owned).collect()
    }
}
