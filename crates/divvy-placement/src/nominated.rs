//! GPUs that are kept for pods which have preempted others and wait until their victims have ended.
//!
//! kube-scheduler writes the node of such a pod into `status.nominatedNodeName`. For every other pod of equal or lower priority it counts the
//! nominated pod as if it ran there (`RunFilterPluginsWithNominatedPods`, kube-scheduler's `framework/runtime/framework.go`). It counts sums of a
//! node; the same rule holds here for each GPU. Otherwise the replacement of a victim takes the GPU that its end made free, and the pod with
//! the higher priority has to preempt again.
//!
//! The nominated pods of a node are placed in the order of their priority, by best fit. If a few pods do not all have room that way, a second way is tried: each
//! pod that takes several GPUs gets those with the most room. The way that serves the more important pods better is used. If only a third way had room for all
//! of them, nothing is kept for the last.

use std::cmp::Reverse;
use std::sync::Arc;

use divvy_model::{Health, MiB, Pod, PodKey};

use crate::products::Taste;
use crate::victims::There;
use crate::{Ask, Ledger, NodeView, choose};

/// The most nominated pods of one node that are counted, those with the highest priority.
const MOST: usize = 64;

/// With more nominated pods than this, only best fit is tried. On a node with hundreds of pods a second way takes milliseconds.
const FEW: usize = 16;

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
        // Read once for all nominated pods: reading takes longer than choosing.
        let pods: Vec<Arc<Pod>> = entry
            .pods
            .keys()
            .filter(|pod| !pod.ended())
            .map(|pod| pod.0.clone())
            .collect();
        let here = self.there(entry.state.as_ref(), pods.iter().map(Arc::as_ref));
        waiting.sort_by(|a, b| (Reverse(a.priority), &a.uid).cmp(&(Reverse(b.priority), &b.uid)));
        waiting.truncate(MOST);
        let with_ask = |pod: Pod| {
            let ask = Ask::of_pod(&pod, self.unit());
            (pod, ask)
        };
        let waiting: Vec<(Pod, Ask)> = waiting.into_iter().map(with_ask).collect();
        let tight = self.keep_for_each(node, &here, &waiting, Way::BestFit);
        let worth = waiting.len() <= FEW && waiting.iter().any(|(_, ask)| ask.gpus > 1);
        if worth && tight.iter().any(|room| *room < Room::Now) {
            let kept = self.nodes.get(node).map(|entry| entry.nominated_to.clone());
            // The most important pod that the two ways serve differently decides.
            if self.keep_for_each(node, &here, &waiting, Way::Roomiest) <= tight
                && let (Some(entry), Some(kept)) = (self.nodes.get_mut(node), kept)
            {
                entry.nominated_to = kept;
            }
        }
    }

    /// Chooses GPUs for the pods in their order, and returns for each pod when it has room.
    fn keep_for_each(&mut self, node: &str, here: &[There<'_>], waiting: &[(Pod, Ask)], way: Way) -> Vec<Room> {
        if let Some(entry) = self.nodes.get_mut(node) {
            entry.nominated_to.clear();
        }
        let mut found = Vec::new();
        for (pod, ask) in waiting {
            let (room, positions) = self.kept_positions(node, here, pod, ask, way);
            found.push(room);
            if let (true, Some(memory), Some(entry)) = (room > Room::Never, ask.memory, self.nodes.get_mut(node)) {
                entry.nominated_to.push(Nominated {
                    pod: pod.key(),
                    uid: pod.uid.clone(),
                    priority: pod.priority,
                    memory,
                    positions,
                });
            }
        }
        found
    }

    /// The GPUs on which the pod has room; else those on which it will have room when its victims have ended.
    fn kept_positions(&self, node: &str, here: &[There<'_>], pod: &Pod, ask: &Ask, way: Way) -> (Room, Vec<usize>) {
        let Some(view) = self.node(node) else {
            return (Room::Never, Vec::new());
        };
        if let Ok(mut positions) = choose::best(&view, &Taste::of(ask)) {
            if way == Way::Roomiest && ask.gpus > 1 {
                positions = roomiest(&view, ask);
            }
            return (Room::Now, positions);
        }
        match self.room_to_come(&view, here, pod, ask) {
            Some(positions) => (Room::ToCome, positions),
            None => (Room::Never, Vec::new()),
        }
    }
}

/// How the GPUs for a nominated pod are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    BestFit,
    /// A pod that takes several GPUs gets those with the most room, which leaves more GPUs with some room.
    Roomiest,
}

/// When a node has room for a nominated pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Room {
    Never,
    /// When its victims have ended.
    ToCome,
    Now,
}

/// As many GPUs as the pod asks for, those with the most room. The caller has checked that enough of them have room.
fn roomiest(view: &NodeView<'_>, ask: &Ask) -> Vec<usize> {
    let taste = Taste::of(ask);
    let gpus = view.state().map(|state| state.gpus.as_slice()).unwrap_or_default();
    let well = gpus.iter().enumerate();
    let well = well.filter(|(_, gpu)| gpu.health == Health::Ok && taste.takes(gpu));
    let mut positions: Vec<usize> = well.map(|(position, _)| position).collect();
    positions.sort_by_key(|position| (Reverse(view.free_for(*position, ask)), *position));
    positions.truncate(ask.gpus);
    positions
}
