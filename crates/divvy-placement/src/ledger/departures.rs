//! Pods that depart from the ledger, and what is kept for them until the node's agent reports it.

use std::collections::BTreeSet;

use divvy_model::{Held, Pod};

use super::Ledger;
use crate::departed::Departed;
use crate::node::NodeState;
use crate::parts;
use crate::usage::TakenUsage;

impl Ledger {
    /// Return the departed pods whose memory is still kept, ordered by UID.
    pub fn departed(&self) -> impl Iterator<Item = (&str, &Departed)> {
        self.departed.iter().map(|(uid, departed)| (uid.as_str(), departed))
    }

    /// Advance the time to `now_ns`, by a clock that never goes back. Pods that departed since the last call start to age now.
    /// Pods that have aged for `limit_ns` are dropped. Return the number of pods that started to age.
    pub fn age_departed(&mut self, now_ns: u64, limit_ns: u64) -> u64 {
        let mut began = 0;
        let mut over = Vec::new();
        for (uid, departed) in &mut self.departed {
            match departed.since_ns {
                None => {
                    departed.since_ns = Some(now_ns);
                    began += 1;
                }
                Some(since) if now_ns.saturating_sub(since) >= limit_ns => over.push(uid.clone()),
                Some(_) => {}
            }
        }
        for uid in over {
            self.let_go(&uid);
        }
        self.settle();
        began
    }

    /// Record that the pod's object has vanished.
    pub(super) fn depart(&mut self, pod: Pod) {
        let Some(node) = pod.node.clone().filter(|_| pod.container_running) else {
            return;
        };
        if matches!(pod.held, Held::Nothing | Held::Unreadable(_)) {
            return;
        }
        // A node that is gone grants nothing anyway.
        let Some(entry) = self.nodes.get_mut(&node).filter(|entry| entry.state.is_some()) else {
            return;
        };
        entry.departed.insert(pod.uid.clone());
        self.dirty.insert(node.clone());
        let departed = Departed {
            pod: pod.key(),
            node,
            held: pod.held,
            since_ns: None,
        };
        self.departed.insert(pod.uid, departed);
    }

    /// Drop a departed pod, and what is kept for it.
    pub(crate) fn let_go(&mut self, uid: &str) {
        if let Some(departed) = self.departed.remove(uid)
            && let Some(entry) = self.nodes.get_mut(&departed.node)
        {
            entry.departed.remove(uid);
            self.dirty.insert(departed.node);
        }
    }

    /// Drop all departed pods of a node that was deleted or replaced.
    pub(crate) fn let_all_go(&mut self, node: &str) {
        for uid in self.nodes.get(node).map(|entry| entry.departed.clone()).unwrap_or_default() {
            self.let_go(&uid);
        }
    }

    /// Drop the departed pods whose memory the node's agent reports. If the agent reports at least as much held memory as
    /// these pods had, the agent counts it from now on, until their containers have ended.
    pub(super) fn hear_of_departed(&mut self, node: &str) {
        while let Some(entry) = self.nodes.get(node).filter(|entry| !entry.departed.is_empty()) {
            let Some(state) = &entry.state else {
                return;
            };
            let sums = self.kept(state, &entry.departed).gpus;
            let spoken_of = |uid: &&String| {
                let parts = self
                    .departed
                    .get(*uid)
                    .map(|departed| parts::of_held(&departed.held, state, self.unit))
                    .unwrap_or_default();
                let covered = |position: usize| Some(state.gpus.get(position)?.held >= *sums.get(position)?);
                !parts.is_empty() && parts.iter().all(|part| part.position.and_then(covered) == Some(true))
            };
            let spoken_of: Vec<String> = entry.departed.iter().filter(spoken_of).cloned().collect();
            if spoken_of.is_empty() {
                return;
            }
            for uid in spoken_of {
                self.let_go(&uid);
            }
        }
    }

    /// Return the memory that is kept for these departed pods on GPUs of the node.
    pub(super) fn kept(&self, state: &NodeState, departed: &BTreeSet<String>) -> TakenUsage {
        let mut kept = TakenUsage::none(Some(state));
        for departed in departed.iter().filter_map(|uid| self.departed.get(uid)) {
            kept.book(&departed.held, Some(state), self.unit);
        }
        kept
    }
}
