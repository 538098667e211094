use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::{Health, MemoryUnit, MiB, Node};

use super::finding::{AuditedCard, Moment};
use divvy_placement::NodeState;

/// The share of a GPU that a pod has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct BookedShare {
    pub(super) memory: MiB,
    pub(super) running: bool,
}

/// The pods' shares of a GPU, by pod UID. They are in a sorted vector, because a large cluster has tens of thousands of GPUs with
/// one or two pods each.
#[derive(Debug, Clone, Default)]
pub(super) struct Bookings(Vec<(Arc<str>, BookedShare)>);

impl Bookings {
    pub(super) fn insert(&mut self, uid: &Arc<str>, booking: BookedShare) {
        match self.position(uid) {
            Ok(position) => self.0[position].1 = booking,
            Err(position) => {
                self.0.reserve_exact(1);
                self.0.insert(position, (uid.clone(), booking));
            }
        }
    }

    pub(super) fn remove(&mut self, uid: &str) {
        if let Ok(position) = self.position(uid) {
            self.0.remove(position);
        }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<str>, &BookedShare)> {
        self.0.iter().map(|(uid, booking)| (uid, booking))
    }

    fn values(&self) -> impl Iterator<Item = &BookedShare> {
        self.0.iter().map(|(_, booking)| booking)
    }

    fn position(&self, uid: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| (**known).cmp(uid))
    }
}

/// A GPU that a node lists or has listed, and the pods on it.
#[derive(Debug, Clone)]
pub(super) struct AuditedGpu {
    pub(super) card: AuditedCard,
    /// The GPU's own device nodes below `/dev`; empty if not known.
    pub(super) nodes: Vec<String>,
    /// Whether the node offers the GPU only as a whole. If so, one pod has all of its memory.
    pub(super) whole: bool,
    pub(super) units: u64,
    /// The memory that is divided into units.
    pub(super) shared: MiB,
    pub(super) capacity: MiB,
    pub(super) held: MiB,
    pub(super) levels: Levels,
    /// When the node first reported the GPU as failed, and the reason.
    pub(super) failed: Option<(Moment, String)>,
    pub(super) booked: Bookings,
    /// Departed pods by UID: the memory that each pod had, and when it departed.
    pub(super) departed: BTreeMap<String, (MiB, Moment)>,
    /// By container ID: the pod's UID, and the memory that the container has by its own report.
    pub(super) used: BTreeMap<String, (String, MiB)>,
    /// The index of the finding that this GPU is overcommitted, while it is.
    pub(super) over: Option<usize>,
    pub(super) over_used: Option<usize>,
}

impl AuditedGpu {
    pub(super) fn sum(&self) -> MiB {
        self.booked
            .values()
            .fold(MiB::ZERO, |sum, booking| sum.saturating_add(booking.memory))
    }

    pub(super) fn running(&self) -> MiB {
        let running = self.booked.values().filter(|booking| booking.running);
        running.fold(MiB::ZERO, |sum, booking| sum.saturating_add(booking.memory))
    }

    pub(super) fn sum_departed(&self) -> MiB {
        self.departed
            .values()
            .fold(MiB::ZERO, |sum, (memory, _)| sum.saturating_add(*memory))
    }

    /// Drop the pods that departed at least `departed_ms` ago.
    pub(super) fn age(&mut self, now: Moment, departed_ms: i64) {
        self.departed.retain(|_, (_, since)| match (since.at_ms, now.at_ms) {
            (Some(since), Some(now)) => now.saturating_sub(since) < departed_ms,
            _ => true,
        });
    }

    pub(super) fn sum_used(&self) -> MiB {
        self.used
            .values()
            .fold(MiB::ZERO, |sum, (_, memory)| sum.saturating_add(*memory))
    }
}

/// A GPU as a node object lists it.
#[derive(Debug)]
pub(super) struct ListedGpu {
    pub(super) index: u32,
    pub(super) uuid: Option<String>,
    pub(super) nodes: Vec<String>,
    pub(super) whole: bool,
    pub(super) units: u64,
    pub(super) shared: MiB,
    pub(super) capacity: MiB,
    pub(super) held: MiB,
    pub(super) health: Health,
    pub(super) reason: Option<String>,
}

/// Return the units in which the node's pods may request memory (the node's own unit first), and the GPUs that the node object
/// lists. A published inventory is used even while it does not add up to the node's capacity, because the GPUs' real sizes count.
/// Without an inventory, the node is read as gpushare reads it.
pub(super) fn listed(node: &Node, unit: MemoryUnit) -> (Vec<MemoryUnit>, Vec<ListedGpu>) {
    if let Some(Ok(inventory)) = &node.inventory {
        let gpus = inventory.gpus.iter().map(|gpu| ListedGpu {
            index: gpu.index,
            uuid: Some(gpu.uuid.clone()),
            nodes: gpu.nodes.clone(),
            whole: !gpu.is_shared(),
            units: gpu.units,
            shared: gpu.total.saturating_sub(gpu.reserve),
            // A whole GPU of unknown size still has something that only one pod can have.
            capacity: MiB(inventory.capacity(gpu).0.max(u64::from(!gpu.is_shared()))),
            held: gpu.held,
            health: gpu.health,
            reason: gpu.reason.clone(),
        });
        return (inventory.units().collect(), gpus.collect());
    }
    let state = NodeState::read(node, unit);
    let gpus = state.gpus.into_iter().map(|gpu| ListedGpu {
        index: gpu.index,
        uuid: gpu.uuid,
        nodes: Vec::new(),
        whole: false,
        units: gpu.units,
        shared: gpu.capacity,
        capacity: gpu.capacity,
        held: gpu.held,
        health: gpu.health,
        reason: gpu.reason,
    });
    (vec![unit], gpus.collect())
}

/// A list of amounts, each with the moment since which at least that much has been held without interruption. Amounts are
/// ascending, and larger amounts have been held for a shorter time. Many short holds, one after the other, do not count as a long
/// one.
#[derive(Debug, Clone, Default)]
pub(super) struct Levels(Vec<(MiB, Moment)>);

impl Levels {
    /// Record that `held` is held now. Return the amounts that are no longer held, each with the moment since which it was held.
    pub(super) fn set(&mut self, held: MiB, at: Moment) -> Vec<(MiB, Moment)> {
        let mut ended = Vec::new();
        let mut since = at;
        while let Some((level, from)) = self.0.last().copied().filter(|(level, _)| *level > held) {
            self.0.pop();
            ended.push((level, from));
            since = from;
        }
        if held > self.0.last().map_or(MiB::ZERO, |(level, _)| *level) {
            self.0.push((held, since));
        }
        ended
    }

    /// Return what is held now: each amount with the moment since which at least that much has been held.
    pub(super) fn now(&self) -> &[(MiB, Moment)] {
        &self.0
    }
}
