//! GPUs that are kept for nominated pods: pods that have preempted others and wait until their victims have ended.
//!
//! kube-scheduler writes the node of such a pod into `status.nominatedNodeName`. For every other pod of equal or lower priority,
//! it counts the nominated pod as if it ran there (`RunFilterPluginsWithNominatedPods` in kube-scheduler's
//! `framework/runtime/framework.go`). kube-scheduler counts sums of a node; here, the same rule holds for each GPU. Otherwise the
//! replacement of a victim would take the GPU that the victim's end made free, and the pod with the higher priority would have to
//! preempt again.
//!
//! The nominated pods of a node are placed in the order of their priority, by best fit. If a few pods do not all have room that
//! way, a second way is tried: each pod that takes several GPUs gets those with the most room. The way that serves the more
//! important pods better is used. If only a third way had room for all of them, nothing is kept for the last.

use std::cmp::Reverse;
use std::sync::Arc;

use divvy_model::{Health, MiB, Pod, PodKey};

use crate::products::Taste;
use crate::victims::There;
use crate::{Ask, Ledger, NodeView, choose};

/// The maximum number of nominated pods of one node that are counted; those with the highest priority.
const MOST: usize = 64;

/// With more nominated pods than this, only best fit is tried. On a node with hundreds of pods, a second way takes milliseconds.
const FEW: usize = 16;

/// The requesting pod, for which room is searched.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asker {
    /// The pod's UID.
    pub uid: String,
    /// The pod's priority.
    pub priority: i32,
}

/// A nominated pod, and the GPUs that are kept for it on its node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Nominated {
    pub pod: PodKey,
    /// The pod's UID.
    pub uid: String,
    /// The pod's priority.
    pub priority: i32,
    /// The memory that is kept on each of the GPUs.
    pub memory: MiB,
    /// The positions of the GPUs in [`crate::NodeState::gpus`].
    pub(crate) positions: Vec<usize>,
}

impl Nominated {
    /// Report whether the requesting pod may not take what is kept for this one, because its priority is equal or lower.
    fn is_kept_from(&self, asker: &Asker) -> bool {
        self.priority >= asker.priority && self.uid != asker.uid
    }
}

impl NodeView<'_> {
    /// Return the nominated pods for which memory of the GPU at this position is kept from the requesting pod, highest priority
    /// first.
    pub fn nominated<'s>(&'s self, position: usize, ask: &'s Ask) -> impl Iterator<Item = &'s Nominated> {
        let here = self.entry.nominated_to.iter();
        let here = here.filter(move |nominated| nominated.positions.contains(&position));
        here.filter(|nominated| ask.asker.as_deref().is_some_and(|asker| nominated.is_kept_from(asker)))
    }

    /// Report whether anything is kept from the requesting pod.
    pub(crate) fn keeps_from(&self, ask: &Ask) -> bool {
        let asker = ask.asker.as_deref();
        let mut all = self.entry.nominated_to.iter();
        asker.is_some_and(|asker| all.any(|nominated| nominated.is_kept_from(asker)))
    }

    /// Return what is free for the requesting pod: [`NodeView::free`] minus what is kept from it.
    pub(crate) fn free_for(&self, position: usize, ask: &Ask) -> MiB {
        self.free(position).saturating_sub(self.kept_from(position, ask))
    }

    /// Return the memory that is kept from the requesting pod.
    pub(crate) fn kept_from(&self, position: usize, ask: &Ask) -> MiB {
        let kept = self.nominated(position, ask).map(|nominated| nominated.memory);
        kept.fold(MiB::ZERO, MiB::saturating_add)
    }
}

impl Ledger {
    /// Choose the GPUs of a node that are kept for the pods nominated to it, one pod after the other.
    pub(crate) fn keep_for_nominated(&mut self, node: &str) {
        let Some(entry) = self.nodes.get_mut(node) else {
            return;
        };
        entry.nominated_to.clear();
        let Some(entry) = self.nodes.get(node).filter(|entry| entry.state.is_some()) else {
            return;
        };
        let pods = entry.nominated.iter().filter_map(|uid| self.pods.get(uid));
        // What is reserved for a pod here is counted already. A reservation on another node belongs to a bind whose outcome is
        // not known yet.
        let waiting = pods.filter(|pod| !pod.deleting && pod.request.wants_gpus() && self.reservation(&pod.uid, node).is_none());
        let mut waiting: Vec<Pod> = waiting.cloned().collect();
        if waiting.is_empty() {
            return;
        }
        // Read the node's pods once for all nominated pods: reading takes longer than choosing.
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

    /// Choose GPUs for the pods in their order, and return for each pod when it has room.
    fn keep_for_each(&mut self, node: &str, here: &[There<'_>], waiting: &[(Pod, Ask)], way: Way) -> Vec<Room> {
        if let Some(entry) = self.nodes.get_mut(node) {
            entry.nominated_to.clear();
        }
        let mut found = Vec::new();
        for (pod, ask) in waiting {
            let (room, positions) = self.kept_positions(node, here, pod, ask, way);
            found.push(room);
            if let (true, Some(memory), Some(entry)) = (room > Room::Never, ask.memory, self.nodes.get_mut(node)) {
                let gpus = entry.state.as_ref().map(|state| state.gpus.as_slice()).unwrap_or_default();
                let kept = positions.iter().filter_map(|position| gpus.get(*position));
                // Of whole GPUs of different sizes, the largest is enough for each.
                let memory = kept.filter_map(|gpu| ask.needs(gpu)).max().unwrap_or(memory);
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

    /// Return the GPUs on which the pod has room, or else those on which it will have room when its victims have ended.
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
    /// When the pod's victims have ended.
    ToCome,
    Now,
}

/// Return as many GPUs as the pod requests, those with the most room. The caller has checked that enough GPUs have room.
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
