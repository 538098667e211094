//! How close a node comes to a request, and a copy of one node from the ledger, on which changes can be tried.

use std::sync::Arc;

use divvy_model::{Health, MiB};

use crate::ask::Ask;
use crate::ledger::Ledger;

/// How close a node comes to a request. Only GPUs that the pod accepts count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// The most memory that is free on one GPU; if the pod requests K GPUs, the most that is free on each of K GPUs.
    pub free: MiB,
    /// The memory that is free on all GPUs together.
    pub sum: MiB,
    /// The value of `free` if no pod held anything and failed GPUs were healthy.
    pub size: MiB,
    /// The number of GPUs with enough memory and compute time free.
    pub fitting: usize,
    /// The number of GPUs with enough memory free, regardless of their compute time.
    pub with_memory: usize,
    /// The most compute time that is free on one of these GPUs, in percent; if the pod requests K GPUs, the most that is free on each of K.
    pub free_cores: u32,
    /// The number of GPUs that the pod accepts.
    pub taken: usize,
    /// The number of these GPUs that failed or are lost.
    pub unwell: usize,
}

impl Ledger {
    /// Report how close a node comes to a request, regardless of what else keeps the pod away. For an unknown node, everything is
    /// 0.
    pub fn room(&self, node: &str, ask: &Ask) -> Room {
        let Some((view, state)) = self.node(node).and_then(|view| Some((view, view.state()?))) else {
            return Room::default();
        };
        let (mut frees, mut sizes, mut cores, mut room) = (Vec::new(), Vec::new(), Vec::new(), Room::default());
        for (position, gpu) in state.gpus.iter().enumerate().filter(|(_, gpu)| ask.takes(gpu)) {
            room.taken += 1;
            sizes.push(gpu.capacity);
            if gpu.health == Health::Ok {
                let free = view.entry.free_for(position, ask);
                room.fitting += usize::from(view.entry.has_room(position, gpu, ask));
                if ask.needs(gpu).is_some_and(|memory| free >= memory) {
                    room.with_memory += 1;
                    cores.push(view.entry.free_cores_for(position, ask));
                }
                frees.push(free);
            } else {
                room.unwell += 1;
            }
        }
        let nth = |amounts: &mut Vec<MiB>| {
            amounts.sort_unstable_by(|a, b| b.cmp(a));
            amounts.get(ask.gpus.saturating_sub(1)).copied().unwrap_or(MiB::ZERO)
        };
        room.sum = frees.iter().copied().fold(MiB::ZERO, MiB::saturating_add);
        (room.free, room.size) = (nth(&mut frees), nth(&mut sizes));
        cores.sort_unstable_by(|a, b| b.cmp(a));
        room.free_cores = cores.get(ask.gpus.saturating_sub(1)).copied().unwrap_or(0);
        room
    }

    /// Copy one node into a ledger of its own: its GPUs, its pods, and what is reserved, kept, and nominated there. About this
    /// node, the copy gives the same answers as this ledger; changing the copy does not change this ledger. For an unknown node,
    /// the copy is empty.
    pub fn only(&self, node: &str) -> Ledger {
        let mut part = Ledger::new(self.unit());
        let Some(entry) = self.nodes.get(node) else {
            return part;
        };
        for uid in entry
            .pods
            .keys()
            .map(|pod| pod.0.uid.as_str())
            .chain(entry.nominated.iter().map(String::as_str))
        {
            if let Some(pod) = self.pods.shared(uid) {
                part.pods.insert(Arc::clone(pod));
            }
        }
        for uid in &entry.departed {
            if let Some(departed) = self.departed.get(uid) {
                part.departed.insert(uid.clone(), departed.clone());
            }
        }
        for uid in &entry.reserved {
            if let Some(reservation) = self.reservation(uid, node) {
                part.book_as_it_is(uid, node, reservation.clone());
            }
        }
        part.nodes.insert(node.to_owned(), entry.clone());
        part
    }

    /// Record that the pod with this UID has ended with all its containers, and that its object is gone.
    pub fn end_pod(&mut self, uid: &str) {
        self.delete_pod(uid);
        self.let_go(uid);
        self.settle();
    }

    /// Record that the containers of a node's deleted pods have ended.
    pub fn end_leftovers(&mut self, node: &str) {
        self.let_all_go(node);
        let gpus = self.nodes.get_mut(node).and_then(|entry| entry.state.as_mut());
        for gpu in gpus.into_iter().flat_map(|state| &mut state.gpus) {
            gpu.held = MiB::ZERO;
        }
        self.dirty.insert(node.to_owned());
        self.settle();
    }
}
