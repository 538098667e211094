//! GPUs that are kept for pods which have preempted others and wait until their victims have ended.
//!
//! kube-scheduler writes the node of such a pod into `status.nominatedNodeName`. For every other pod of equal or lower priority it counts the
//! nominated pod as if it ran there (`RunFilterPluginsWithNominatedPods`, kube-scheduler's `framework/runtime/framework.go`). It counts sums of a
//! node; the same rule holds here for each GPU. Otherwise the replacement of a victim takes the GPU that its end made free, and the pod with
//! the higher priority has to preempt again.
//!
//! Several nominated pods of a node are placed one after the other, by best fit. Where only another order has room for all of them, nothing is kept for
//! the last.

use std::cmp::Reverse;
use std::sync::Arc;

use divvy_model::{MiB, Pod, PodKey};

use crate::products::Taste;
use crate::victims::There;
use crate::{Ask, Ledger, NodeView, choose};

/// The most nominated pods of one node that are counted, those with the highest priority.
const MOST: usize = 64;

/// The pod for which room is looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asker {
    /// Its UID.
    pub uid: String,
    /// Its priority.
    pub priority: i32,
}

/// A pod that is nominated to a node, and the GPUs that are kept for it there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nominated {
    /// The pod.
    pub pod: PodKey,
    /// Its UID.
    pub uid: String,
    /// Its priority.
    pub priority: i32,
    /// What is kept on each of the GPUs.
    pub memory: MiB,
    /// Positions in [`crate::NodeState::gpus`].
    pub(crate) positions: Vec<usize>,
}

impl Nominated {
    /// A pod of equal or lower priority may not take what is kept for this one.
    fn is_kept_from(&self, asker: &Asker) -> bool {
        self.priority >= asker.priority && self.uid != asker.uid
    }
}

impl NodeView<'_> {
    /// The pods for which memory of the GPU at this position is kept from the pod that asks, the highest priority first.
    pub fn nominated<'s>(&'s self, position: usize, ask: &'s Ask) -> impl Iterator<Item = &'s Nominated> {
        let here = self.entry.nominated_to.iter();
        let here = here.filter(move |nominated| nominated.positions.contains(&position));
        here.filter(|nominated| ask.asker.as_deref().is_some_and(|asker| nominated.is_kept_from(asker)))
    }

    /// Whether anything is kept from the pod that asks.
    pub(crate) fn keeps_from(&self, ask: &Ask) -> bool {
        let asker = ask.asker.as_deref();
        let mut all = self.entry.nominated_to.iter();
        asker.is_some_and(|asker| all.any(|nominated| nominated.is_kept_from(asker)))
    }

    /// As [`NodeView::free`], less what is kept from the pod that asks.
    pub(crate) fn free_for(&self, position: usize, ask: &Ask) -> MiB {
        self.free(position).saturating_sub(self.kept_from(position, ask))
    }

    /// What is kept from the pod that asks.
    pub(crate) fn kept_from(&self, position: usize, ask: &Ask) -> MiB {
        let kept = self.nominated(position, ask).map(|nominated| nominated.memory);
        kept.fold(MiB::ZERO, MiB::saturating_add)
    }
}

impl Ledger {
    /// Finds the GPUs of a node that are kept for the pods nominated to it, one pod after the other.
    pub(crate) fn keep_for_nominated(&mut self, node: &str) {
        let Some(entry) = self.nodes.get_mut(node) else {
            return;
        };
        entry.nominated_to.clear();
        let Some(entry) = self.nodes.get(node).filter(|entry| entry.state.is_some()) else {
            return;
        };
        let pods = entry.nominated.iter().filter_map(|uid| self.pods.get(uid));
        // What is reserved for a pod here is booked already. A reservation on another node is of a bind whose outcome is not known yet.
        let waiting =
            pods.filter(|pod| !pod.deleting && pod.request.wants_memory() && self.reservation(&pod.uid, node).is_none());
        let mut waiting: Vec<Pod> = waiting.cloned().collect();
        if waiting.is_empty() {
            return;
        }
        // Read once for all of them: that takes longer than to choose.
        let pods: Vec<Arc<Pod>> = entry
            .pods
            .keys()
            .filter(|pod| !pod.ended())
            .map(|pod| pod.0.clone())
            .collect();
        let here = self.there(entry.state.as_ref(), pods.iter().map(Arc::as_ref));
        waiting.sort_by(|a, b| (Reverse(a.priority), &a.uid).cmp(&(Reverse(b.priority), &b.uid)));
        for pod in waiting.into_iter().take(MOST) {
            let ask = Ask::of_pod(&pod, self.unit());
            let (Some(positions), Some(memory)) = (self.kept_positions(node, &here, &pod, &ask), ask.memory) else {
                continue;
            };
            if let Some(entry) = self.nodes.get_mut(node) {
                entry.nominated_to.push(Nominated {
                    pod: pod.key(),
                    uid: pod.uid,
                    priority: pod.priority,
                    memory,
                    positions,
                });
            }
        }
    }

    /// The GPUs on which the pod has room; else those on which it will have room when its victims have ended.
    fn kept_positions(&self, node: &str, here: &[There<'_>], pod: &Pod, ask: &Ask) -> Option<Vec<usize>> {
        let view = self.node(node)?;
        if let Ok(positions) = choose::best(&view, &Taste::of(ask)) {
            return Some(positions);
        }
        self.room_to_come(&view, here, pod, ask)
    }
}
