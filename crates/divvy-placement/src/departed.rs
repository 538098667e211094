use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Health, Held, MiB, Pod, PodKey};

use crate::ledger::Usage;
use crate::{Ask, Ledger, NodeState, Source};

/// A pod whose object vanished while a container of it was last seen running: force-deleted, most likely. Its containers
/// end soon, but not at once, and the node's agent needs a moment until it says what they hold (`heldMiB`). Until then this
/// memory is not given again.
///
/// It counts until the agent's word covers all that such pods have on the GPU, until the node's object goes, or until the
/// caller's time limit ([`Ledger::age_departed`]), whichever comes first. A pod that was deleted gracefully had its containers
/// ended before its object went, and none of this applies. It lives in this ledger alone: a ledger that is built anew knows
/// nothing of it, and then `heldMiB` and the agent's own check before a container starts stand between.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Departed {
    /// The pod.
    pub pod: PodKey,
    /// Where it was bound.
    pub node: String,
    /// What it held.
    pub held: Held,
    /// Since when, by the caller's clock in nanoseconds; `None` until the caller has said what time it is.
    pub since_ns: Option<u64>,
}

/// Memory of a GPU that is kept for a [`Departed`] pod, and is all that keeps a request from it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptFor {
    /// The GPU's index.
    pub index: u32,
    /// The pod with the largest share.
    pub pod: PodKey,
    /// Its share.
    pub memory: MiB,
}

impl Ledger {
    /// Pods that vanished while a container was last seen running, and whose memory is still kept, by UID.
    pub fn departed(&self) -> impl Iterator<Item = (&str, &Departed)> {
        self.departed.iter().map(|(uid, departed)| (uid.as_str(), departed))
    }

    /// It is `now_ns`, by a clock that never goes back: who departed since the last call begins to count now, and those who have
    /// counted for `limit_ns` count no more. Gives how many began.
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

    /// If a request does not fit on a node, but would if nothing were kept for pods that departed: whose memory that is.
    pub fn kept_from(&self, node: &str, ask: &Ask) -> Option<KeptFor> {
        let view = self.node(node)?;
        let state = view.state().filter(|state| !matches!(state.source, Source::Unusable(_)))?;
        let memory = ask.memory.filter(|memory| *memory > MiB::ZERO)?;
        if ask.gpus > 1 && state.source != Source::Inventory {
            return None;
        }
        let gpus = state.gpus.iter().enumerate();
        let well = gpus.filter(|(_, gpu)| gpu.health == Health::Ok && ask.takes(gpu));
        let (now, rest): (Vec<_>, Vec<_>) = well.partition(|(position, _)| view.free(*position) >= memory);
        let mut then = rest
            .into_iter()
            .filter(|(position, _)| view.free_without_departed(*position) >= memory);
        if now.len() >= ask.gpus || now.len() + then.clone().count() < ask.gpus {
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

    /// The pod's object has vanished.
    pub(crate) fn depart(&mut self, pod: Pod) {
        let Some(node) = pod.node.clone().filter(|_| pod.container_running) else {
            return;
        };
        if matches!(pod.held, Held::Nothing | Held::Unreadable(_)) {
            return;
        }
        // Of a node that is gone nothing is given anyway.
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

    /// The node is another one, or none.
    pub(crate) fn let_all_go(&mut self, node: &str) {
        for uid in self.nodes.get(node).map(|entry| entry.departed.clone()).unwrap_or_default() {
            self.let_go(&uid);
        }
    }

    /// Lets those go of whom the node's agent has spoken: it says that at least as much is held as they had, so it counts them
    /// itself from now on, until their containers have ended.
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

    /// What is kept for these pods, as far as it goes to GPUs.
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

    /// UID, name and share of those for whom memory of a GPU is kept, the largest share first, then by name.
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
