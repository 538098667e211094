use divvy_model::Pod;

use super::{ExtenderCore, NotSynced};

/// Pods on one node that kube-scheduler may evict to make room for another pod.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Eviction {
    /// The node's name.
    pub node: String,
    /// UIDs of the pods to evict.
    pub victims: Vec<String>,
    /// The number of evictions that would violate a PodDisruptionBudget, as kube-scheduler counted them.
    pub pdb_violations: i64,
}

/// The maximum number of nodes in one call of [`ExtenderCore::preempt`]. A request of kube-scheduler may name hundreds of nodes, each
/// with all its pods, and other requests wait for the core during a call. The answer for one node does not depend on the others,
/// so the caller can split a request.
pub const EVICTIONS_AT_ONCE: usize = 8;

impl ExtenderCore {
    /// Correct kube-scheduler's proposed evictions. kube-scheduler only counts the free memory of a whole node, so it might evict
    /// pods on different GPUs without making room on any of them.
    ///
    /// Omit the nodes where evicting pods of lower priority cannot make room. Keep the counts of PodDisruptionBudget violations as
    /// they are.
    ///
    /// # Errors
    /// Fails until pods and nodes have been listed.
    pub fn preempt(&self, pod: &Pod, proposed: Vec<Eviction>) -> Result<Vec<Eviction>, NotSynced> {
        self.synced()?;
        let ledger = self.index.ledger();
        if !pod.request.wants_gpus() {
            return Ok(proposed);
        }
        let corrected = proposed.into_iter().filter_map(|eviction| {
            let victims = ledger.victims(&eviction.node, pod, &eviction.victims)?;
            Some(Eviction { victims, ..eviction })
        });
        // kube-scheduler does not accept a node without victims.
        Ok(corrected.filter(|eviction| !eviction.victims.is_empty()).collect())
    }
}
