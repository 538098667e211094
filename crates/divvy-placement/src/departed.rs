//! Departed pods: their objects are gone, and their containers most likely still run.

use divvy_model::{Held, PodKey};

/// A departed pod: its object vanished while one of its containers was last seen running, most likely because it was
/// force-deleted. Its containers end soon, but not at once, and the node's agent needs a moment until it reports the memory that
/// they hold (`heldMiB`). Until then, this memory is not granted again.
///
/// The memory is kept until the agent reports at least as much as all departed pods had on the GPU, until the node's object is
/// gone, or until the caller's time limit ([`crate::Ledger::age_departed`]), whichever comes first. A pod that was deleted gracefully is
/// not affected, because its containers ended before its object was removed. Departed pods exist only in this ledger. A ledger
/// that is built again does not know them; then `heldMiB` and the arbiter (the agent's last check before a container starts)
/// prevent a double grant.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departed {
    pub pod: PodKey,
    /// The node to which the pod was bound.
    pub node: String,
    /// What the pod held.
    pub held: Held,
    /// When the pod departed, by the caller's clock in nanoseconds; `None` until the next call of [`crate::Ledger::age_departed`].
    pub since_ns: Option<u64>,
}
