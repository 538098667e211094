//! What is known about one node name, and what is free on the node's GPUs.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{ALL_CORES, Health, MemoryUnit, MiB, PodKey, WholeKind};

use crate::amount::Amount;
use crate::ask::{Ask, Asker};
use crate::node::{GpuState, NodeState};
use crate::parts;
use crate::pods::ByUid;
use crate::usage::TakenUsage;

/// What is free on each healthy, shared GPU with anything free, in the order of the GPUs.
#[derive(Debug, Clone)]
pub(crate) struct FreePieces(Vec<MiB>);

/// Everything known about one node name. Many nodes of a cluster have no GPU, so what only GPUs need is small without them.
#[derive(Debug, Clone, Default)]
pub(crate) struct NodeAccount {
    pub(crate) state: Option<NodeState>,
    /// Pod → its arrival number, which is higher the later the pod came to this node.
    pub(crate) pods: BTreeMap<ByUid, u64>,
    pub(crate) reserved: BTreeSet<String>,
    pub(crate) departed: BTreeSet<String>,
    /// The UIDs of the pods nominated to this node.
    pub(crate) nominated: BTreeSet<String>,
    /// The GPUs kept for the nominated pods, highest priority first.
    pub(crate) nominated_to: Vec<Nominated>,
    pub(crate) usage: TakenUsage,
    /// What is free on its GPUs. `None` if nothing is.
    pub(crate) free_pieces: Option<Box<FreePieces>>,
    pub(crate) version: u64,
}

impl NodeAccount {
    /// Return the free memory of the GPU at this position of [`NodeState::gpus`], regardless of its health; 0 if more is
    /// allocated than it has.
    pub(crate) fn free(&self, position: usize) -> MiB {
        self.free_beside(position, MiB::ZERO)
    }

    /// Return the free memory as [`NodeAccount::free`] does, as if `own` were not allocated there.
    pub(crate) fn free_beside(&self, position: usize, own: MiB) -> MiB {
        // The memory that the agent reports as held may be the memory of these departed pods, so only the larger of the two
        // counts.
        let departed = self.usage.departed.get(position).copied().unwrap_or(MiB::ZERO);
        self.free_beside_and_kept(position, own, departed)
            .saturating_sub(self.usage.departed_anywhere)
    }

    /// Return the free memory as [`NodeAccount::free`] does, as if nothing were kept for departed pods.
    pub(crate) fn free_without_departed(&self, position: usize) -> MiB {
        self.free_beside_and_kept(position, MiB::ZERO, MiB::ZERO)
    }

    fn free_beside_and_kept(&self, position: usize, own: MiB, kept: MiB) -> MiB {
        let held = self.gpu(position).map_or(MiB::ZERO, |gpu| gpu.held);
        self.free_beside_and_held(position, own, held.max(kept))
    }

    /// Return the memory that is free once the containers of deleted pods have ended.
    pub(crate) fn free_in_time(&self, position: usize, own: MiB) -> MiB {
        self.free_beside_and_held(position, own, MiB::ZERO)
    }

    fn free_beside_and_held(&self, position: usize, own: MiB, held: MiB) -> MiB {
        let capacity = self.gpu(position).map_or(MiB::ZERO, |gpu| gpu.capacity);
        let used = self.usage.gpus.get(position).copied().unwrap_or(MiB::ZERO);
        parts::free(capacity, used.saturating_sub(own), self.usage.anywhere, held)
    }

    /// Return what is free, as if `own` were not allocated there.
    pub(crate) fn beside(&self, position: usize, own: Amount) -> Amount {
        Amount {
            memory: self.free_beside(position, own.memory),
            cores: self.free_cores(position, own.cores),
        }
    }

    /// Return what is free once the containers of deleted pods have ended, as if `own` were not allocated there.
    pub(crate) fn beside_in_time(&self, position: usize, own: Amount) -> Amount {
        Amount {
            memory: self.free_in_time(position, own.memory),
            cores: self.free_cores(position, own.cores),
        }
    }

    /// Return the compute time of the GPU that no pod has as its share, in percent, as if `own` were not allocated there. Pods without a share are not
    /// counted: they may use whatever the others leave.
    pub(crate) fn free_cores(&self, position: usize, own: u32) -> u32 {
        let used = self.usage.cores.get(position).copied().unwrap_or(0);
        ALL_CORES.saturating_sub(used.saturating_sub(own))
    }

    fn gpu(&self, position: usize) -> Option<&GpuState> {
        self.state.as_ref().and_then(|state| state.gpus.get(position))
    }

    /// Return the memory in [`NodeAccount::free_pieces`].
    pub(crate) fn each_free_piece(&self) -> impl Iterator<Item = MiB> {
        self.free_pieces.iter().flat_map(|pieces| &pieces.0).copied()
    }

    /// Compute [`NodeAccount::free_pieces`].
    pub(crate) fn count_free_pieces(&self) -> Option<Box<FreePieces>> {
        let state = self.state.as_ref().filter(|state| state.unusable(None).is_none());
        let gpus = state.iter().flat_map(|state| state.gpus.iter().enumerate());
        let shared = gpus.filter(|(_, gpu)| gpu.health == Health::Ok && gpu.is_shared());
        let free = shared.map(|(position, _)| self.free(position));
        let pieces: Vec<MiB> = free.filter(|free| *free > MiB::ZERO).collect();
        (!pieces.is_empty()).then(|| Box::new(FreePieces(pieces)))
    }

    /// Compute the most memory that a share can have on any one healthy GPU.
    pub(crate) fn count_most_free(&self) -> MiB {
        let one = Ask::new(1, MemoryUnit::GIB);
        let gpus = self.state.iter().flat_map(|state| state.gpus.iter().enumerate());
        gpus.filter(|(_, gpu)| gpu.health == Health::Ok && gpu.is_shared())
            .filter(|(position, _)| !self.is_kept_free(*position, &one))
            .map(|(position, _)| self.free(position))
            .max()
            .unwrap_or(MiB::ZERO)
    }

    /// Return the nominated pods for which memory of the GPU at this position is kept from the requesting pod, highest priority
    /// first.
    pub(crate) fn nominated_ahead_of<'s>(&'s self, position: usize, ask: &'s Ask) -> impl Iterator<Item = &'s Nominated> {
        let here = self.nominated_to.iter();
        let here = here.filter(move |nominated| nominated.positions.contains(&position));
        here.filter(|nominated| ask.asker.as_deref().is_some_and(|asker| nominated.is_kept_from(asker)))
    }

    /// Report whether anything is kept from the requesting pod.
    pub(crate) fn keeps_from(&self, ask: &Ask) -> bool {
        let asker = ask.asker.as_deref();
        let mut all = self.nominated_to.iter();
        asker.is_some_and(|asker| all.any(|nominated| nominated.is_kept_from(asker)))
    }

    /// Return what is free for the requesting pod: [`NodeAccount::free`] minus what is kept from it.
    pub(crate) fn free_for(&self, position: usize, ask: &Ask) -> MiB {
        self.free(position).saturating_sub(self.kept_from(position, ask).memory)
    }

    /// Return the compute time that is free for the requesting pod, in percent.
    pub(crate) fn free_cores_for(&self, position: usize, ask: &Ask) -> u32 {
        self.free_cores(position, 0)
            .saturating_sub(self.kept_from(position, ask).cores)
    }

    /// Report whether the GPU has room for the requesting pod.
    pub(crate) fn has_room(&self, position: usize, gpu: &GpuState, ask: &Ask) -> bool {
        let memory = ask.needs(gpu).is_some_and(|memory| self.free_for(position, ask) >= memory);
        memory && self.has_cores(position, ask)
    }

    /// Report whether the GPU has as much free compute time as the pod requests.
    pub(crate) fn has_cores(&self, position: usize, ask: &Ask) -> bool {
        ask.cores == 0 || self.free_cores_for(position, ask) >= ask.cores
    }

    /// Return what is kept from the requesting pod.
    pub(crate) fn kept_from(&self, position: usize, ask: &Ask) -> Amount {
        let kept = self.nominated_ahead_of(position, ask).map(Nominated::amount);
        kept.fold(Amount::NONE, Amount::plus)
    }

    /// Return the number of whole GPUs of a kind that pods of this node hold without an allocation, so that it is not known
    /// which they are.
    pub(crate) fn unnamed_whole(&self, kind: WholeKind) -> u64 {
        self.usage.unnamed_whole.get(&kind).copied().unwrap_or(0)
    }

    /// Return how many of the [`NodeAccount::unnamed_whole`] GPUs look free. The inventory shows the others as held, although
    /// neither a pod's allocation nor a departed pod explains that.
    pub(crate) fn unlocated_whole(&self, kind: WholeKind) -> u64 {
        let unnamed = self.unnamed_whole(kind);
        match unnamed {
            0 => 0,
            _ => unnamed.saturating_sub(self.located_whole(kind).count() as u64),
        }
    }

    /// Among the GPUs of a kind on which nothing is booked, return how many may get shares of one pod. The others stay free,
    /// because pods without an allocation may have any of them.
    fn spare_for_shares(&self, kind: WholeKind, ask: &Ask) -> u64 {
        self.free_whole(kind, ask).saturating_sub(self.unlocated_whole(kind))
    }

    /// Report whether shares must stay off the GPU at this position for now, because pods without an allocation may have all free GPUs.
    pub(crate) fn is_kept_free(&self, position: usize, ask: &Ask) -> bool {
        self.blank(position, ask)
            .is_some_and(|kind| self.spare_for_shares(kind, ask) == 0)
    }

    /// Return these GPUs in their order, without those that must stay free for pods without an allocation. The remaining
    /// GPUs may all get shares of one pod.
    pub(crate) fn spared(&self, positions: impl IntoIterator<Item = usize>, ask: &Ask) -> Vec<usize> {
        let mut left: BTreeMap<WholeKind, u64> = BTreeMap::new();
        let kept = positions.into_iter().filter(|position| {
            let Some(kind) = self.blank(*position, ask) else {
                return true;
            };
            let left = left.entry(kind).or_insert_with(|| self.spare_for_shares(kind, ask));
            let some = *left > 0;
            *left = left.saturating_sub(1);
            some
        });
        kept.collect()
    }

    /// Return the kind of a GPU on which nothing is booked, if a pod without an allocation may have the GPU as a whole. Return `None`
    /// for other GPUs, and if the request is for whole GPUs.
    fn blank(&self, position: usize, ask: &Ask) -> Option<WholeKind> {
        // Most nodes have no such pods.
        if ask.whole.is_some() || self.usage.unnamed_whole.is_empty() {
            return None;
        }
        let gpu = self.gpu(position).filter(|gpu| self.free(position) >= gpu.capacity)?;
        gpu.whole.filter(|kind| self.unlocated_whole(*kind) > 0)
    }

    /// Return the number of whole GPUs of a kind that are free for the requesting pod: they are healthy, nothing is booked
    /// on them, and nothing of them is kept for a nominated pod.
    pub(crate) fn free_whole(&self, kind: WholeKind, ask: &Ask) -> u64 {
        let gpus = self.state.iter().flat_map(|state| state.gpus.iter().enumerate());
        let free = gpus.filter(|(position, gpu)| {
            gpu.whole == Some(kind) && gpu.health == Health::Ok && self.free_for(*position, ask) >= gpu.capacity
        });
        free.count() as u64
    }

    /// Return how many GPUs must have room for the pod once all held GPUs are free: as many as it requests, plus
    /// [`NodeAccount::unnamed_whole`].
    pub(crate) fn needed(&self, ask: &Ask) -> usize {
        let unnamed = ask.whole.map_or(0, |kind| self.unnamed_whole(kind));
        ask.gpus.saturating_add(usize::try_from(unnamed).unwrap_or(usize::MAX))
    }

    /// Return how many GPUs must have room for the pod while the held GPUs are still held: as many as it requests, plus
    /// [`NodeAccount::unlocated_whole`].
    pub(crate) fn needed_now(&self, ask: &Ask) -> usize {
        let unlocated = ask.whole.map_or(0, |kind| self.unlocated_whole(kind));
        ask.gpus.saturating_add(usize::try_from(unlocated).unwrap_or(usize::MAX))
    }

    /// Return the positions of the GPUs of a kind that pods without an allocation have: the inventory says so, or, if the agent's release does not
    /// say who holds a GPU, neither a pod's allocation nor a departed pod explains it.
    pub(crate) fn located_whole(&self, kind: WholeKind) -> impl Iterator<Item = usize> {
        let explained = |memory: &[MiB], position: usize| memory.get(position).is_some_and(|memory| *memory > MiB::ZERO);
        let gpus = self.state.as_ref().map(|state| state.gpus.as_slice()).unwrap_or_default();
        let located = gpus.iter().enumerate().filter(move |(position, gpu)| {
            gpu.whole == Some(kind)
                && gpu.held > MiB::ZERO
                && gpu.held_by_pod != Some(false)
                && !explained(&self.usage.gpus, *position)
                && !explained(&self.usage.departed, *position)
        });
        located.map(|(position, _)| position)
    }
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
    /// The compute time that is kept on each of the GPUs, in percent.
    pub cores: u32,
    /// The positions of the GPUs in [`crate::NodeState::gpus`].
    pub(crate) positions: Vec<usize>,
}

impl Nominated {
    fn amount(&self) -> Amount {
        Amount {
            memory: self.memory,
            cores: self.cores,
        }
    }

    /// Report whether the GPUs are kept from the requesting pod: it is another pod, of equal or lower priority.
    fn is_kept_from(&self, asker: &Asker) -> bool {
        self.priority >= asker.priority && self.uid != asker.uid
    }
}
