use divvy_model::Pod;

use super::Core;

/// Pods of one node that are to go for another one.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Eviction {
    /// The node.
    pub node: String,
    /// Their UIDs.
    pub victims: Vec<String>,
    /// How many of them a PodDisruptionBudget forbids, by what kube-scheduler has counted.
    pub pdb_violations: i64,
}

/// How many nodes kube-scheduler's question is answered for in one call of [`Core::preempt`]: it may name hundreds, each with all of its pods,
/// and others wait for the core meanwhile. What is answered for one node does not depend on the others.
pub const EVICTIONS_AT_ONCE: usize = 8;

impl Core {
    /// What kube-scheduler proposes to evict, corrected: it counts what a node has left in all, and would evict pods in vain whose memory is on two GPUs. Nodes
    /// where nobody of lower priority makes room on one GPU are left out. Budgets are taken as they were counted.
    pub fn preempt(&self, pod: &Pod, proposed: Vec<Eviction>) -> Result<Vec<Eviction>, String> {
        if let Some(why) = self.not_synced() {
            return Err(why);
        }
        let ledger = self.index.ledger();
        if !pod.request.wants_memory() {
            return Ok(proposed);
        }
        let corrected = proposed.into_iter().filter_map(|eviction| {
            let victims = ledger.victims(&eviction.node, pod, &eviction.victims)?;
            Some(Eviction { victims, ..eviction })
        });
        // kube-scheduler takes no node without victims.
        Ok(corrected.filter(|eviction| !eviction.victims.is_empty()).collect())
    }
}
