//! Pods that wait for GPUs, and what is in their way.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::Arc;

use divvy_model::Pod;

use crate::pods::ByUid;

/// What is in the way of a pod that waits for GPUs. The order is that of the hope: what may change soonest, and without anybody's help, is first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WaitReason {
    /// GPUs that the pod accepts are large enough, but too little of them is free.
    NoRoom,
    /// The node, its agent, or its inventory is not ready.
    NodeNotReady,
    /// The node counts GPU memory in another unit, or its units do not fit its GPUs.
    Unit,
    /// The pod's rules accept none of the GPUs, or fewer than it requests.
    Model,
    /// No node could give the pod the GPUs that it requests, even if nothing were taken there.
    NoGpuFits,
    /// Something else: another part of the scheduler, a rule of the pod that cannot be read, or nothing that is known yet.
    Other,
}

impl WaitReason {
    /// All reasons, each with its name in metrics.
    pub const ALL: [(WaitReason, &'static str); 6] = [
        (WaitReason::NoRoom, "no_room"),
        (WaitReason::NodeNotReady, "node_not_ready"),
        (WaitReason::Unit, "unit"),
        (WaitReason::Model, "model"),
        (WaitReason::NoGpuFits, "no_gpu_fits"),
        (WaitReason::Other, "other"),
    ];
}

/// Report whether a pod waits for GPUs: it requests some, has no node, has not ended, and is not being deleted.
fn waits(pod: &Pod) -> bool {
    pod.node.is_none() && pod.request.wants_gpus() && !pod.deleting && !pod.ended()
}

/// What is known of a pod that waits.
#[derive(Debug, Clone, Copy)]
struct KnownWait {
    reason: WaitReason,
    /// Whether the reason is from an answer to kube-scheduler, which knows more about the pod than the ledger.
    is_answer: bool,
}

/// The pods that wait for GPUs. They share the memory of the ledger's pods.
#[derive(Debug, Clone, Default)]
pub(crate) struct WaitingPods {
    pods: BTreeMap<ByUid, KnownWait>,
    counts: [u64; WaitReason::ALL.len()],
}

impl WaitingPods {
    /// Record the present state of a pod. A pod that goes on waiting keeps its reason.
    pub(crate) fn apply(&mut self, pod: &Arc<Pod>) {
        let known = self.forget(&pod.uid).unwrap_or(KnownWait {
            reason: WaitReason::Other,
            is_answer: false,
        });
        if waits(pod) {
            self.counts[known.reason as usize] += 1;
            self.pods.insert(ByUid(pod.clone()), known);
        }
    }

    /// Record that a pod is gone.
    pub(crate) fn remove(&mut self, uid: &str) {
        self.forget(uid);
    }

    fn forget(&mut self, uid: &str) -> Option<KnownWait> {
        let known = self.pods.remove(uid)?;
        self.counts[known.reason as usize] -= 1;
        Some(known)
    }

    /// Set why a pod waits, if it does. What was answered to kube-scheduler is replaced only by another answer.
    pub(crate) fn set(&mut self, uid: &str, reason: WaitReason, is_answer: bool) {
        if let Some(known) = self.pods.get_mut(uid).filter(|known| is_answer || !known.is_answer) {
            self.counts[known.reason as usize] -= 1;
            self.counts[reason as usize] += 1;
            *known = KnownWait { reason, is_answer };
        }
    }

    /// Return the number of pods for each reason, in the order of [`WaitReason::ALL`].
    pub(crate) fn counts(&self) -> [u64; WaitReason::ALL.len()] {
        self.counts
    }

    /// Return the pods whose UIDs come after this one, in the order of their UIDs, each with whether an answer to kube-scheduler has set its
    /// reason.
    pub(crate) fn after<'a>(&'a self, uid: &str) -> impl Iterator<Item = (&'a Pod, bool)> {
        let rest = self.pods.range::<str, _>((Bound::Excluded(uid), Bound::Unbounded));
        rest.map(|(pod, known)| (&**pod, known.is_answer))
    }
}
