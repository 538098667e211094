use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Health, Held, MiB, Pod, PodKey};

use crate::ledger::Usage;
use crate::{Ask, Ledger, NodeState, choose};

/// A departed pod: its object vanished while one of its containers was last seen running, most likely because it was
/// force-deleted. Its containers end soon, but not at once, and the node's agent needs a moment until it reports the memory that
/// they hold (`heldMiB`). Until then, this memory is not granted again.
///
/// The memory is kept until the agent reports at least as much as all departed pods had on the GPU, until the node's object is
/// gone, or until the caller's time limit ([`Ledger::age_departed`]), whichever comes first. A pod that was deleted gracefully is
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
    /// When the pod departed, by the caller's clock in nanoseconds; `None` until the next call of [`Ledger::age_departed`].
    pub since_ns: Option<u64>,
}

/// Memory of a GPU that is kept for a [`Departed`] pod, if only this memory prevents a request from fitting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFor {
    /// The GPU's NVML index.
    pub index: u32,
    /// The departed pod with the largest share of the GPU.
    pub pod: PodKey,
    /// The memory kept for this pod.
    pub memory: MiB,
}

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

    /// If a request does not fit on a node, but would fit if nothing were kept for departed pods, return the pod whose memory is
    /// in the way.
    pub fn kept_from(&self, node: &str, ask: &Ask) -> Option<KeptFor> {
        let view = self.node(node)?;
        let state = view.state().filter(|state| state.unusable(ask.whole).is_none())?;
        if ask.is_nothing() || ask.memory.is_none() || choose::takes_one_at_most(state, ask) {
            return None;
        }
        let needed = view.needed(ask);
        let gpus = state.gpus.iter().enumerate();
        let well = gpus.filter(|(_, gpu)| gpu.health == Health::Ok && ask.takes(gpu));
        let (now, rest): (Vec<_>, Vec<_>) = well.partition(|(position, gpu)| Some(view.free(*position)) >= ask.needs(gpu));
        let mut then = rest
            .into_iter()
            .filter(|(position, gpu)| Some(view.free_without_departed(*position)) >= ask.needs(gpu));
        if now.len() >= needed || now.len() + then.clone().count() < needed {
            return None;
        }
        then.find_map(|(position, gpu)| {
            let departed = view.departed(position).into_iter().next();
            departed.map(|(_, pod, memory)| KeptFor {
                index: gpu.index,
                pod,
                memory,
            })
        })
    }

    /// Record that the pod's object has vanished.
    pub(crate) fn depart(&mut self, pod: Pod) {
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

    /// Drop the departed pods that the node's agent has reported: if it reports at least as much held memory as they had, it
    /// counts them itself from now on, until their containers have ended.
    pub(crate) fn hear_of_departed(&mut self, node: &str) {
        while let Some(entry) = self.nodes.get(node).filter(|entry| !entry.departed.is_empty()) {
            let Some(state) = &entry.state else {
                return;
            };
            let sums = self.kept(state, &entry.departed).gpus;
            let spoken_of = |uid: &&String| {
                let parts = self
                    .departed
                    .get(*uid)
                    .map(|departed| self.parts(state, &departed.held))
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

    /// Return what is kept for these pods, as far as it is on GPUs of the node.
    pub(crate) fn kept(&self, state: &NodeState, departed: &BTreeSet<String>) -> Usage {
        let mut kept = Usage {
            gpus: vec![MiB::ZERO; state.gpus.len()],
            ..Usage::default()
        };
        for departed in departed.iter().filter_map(|uid| self.departed.get(uid)) {
            self.book(&mut kept, Some(state), &departed.held);
        }
        kept
    }

    /// Return UID, name, and share of the departed pods for which memory of a GPU is kept: largest share first, then by name.
    pub(crate) fn departed_of(&self, node: &str, position: usize) -> Vec<(String, PodKey, MiB)> {
        let Some(entry) = self.nodes.get(node) else {
            return Vec::new();
        };
        let Some(state) = &entry.state else {
            return Vec::new();
        };
        let mut shares: BTreeMap<&String, MiB> = BTreeMap::new();
        for uid in &entry.departed {
            let parts = self
                .departed
                .get(uid)
                .map(|departed| self.parts(state, &departed.held))
                .unwrap_or_default();
            for part in parts.iter().filter(|part| part.position == Some(position)) {
                let share = shares.entry(uid).or_default();
                *share = share.saturating_add(part.memory);
            }
        }
        let mut shares: Vec<(String, PodKey, MiB)> = shares
            .into_iter()
            .filter_map(|(uid, memory)| Some((uid.clone(), self.departed.get(uid)?.pod.clone(), memory)))
            .filter(|(_, _, memory)| *memory > MiB::ZERO)
            .collect();
        shares.sort_by(|a, b| (b.2, &a.1, &a.0).cmp(&(a.2, &b.1, &b.0)));
        shares
    }
}
