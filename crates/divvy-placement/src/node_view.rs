//! What the ledger answers about one node.

use std::collections::BTreeMap;

use divvy_model::{MemoryUnit, MiB, Pod, PodKey, WholeKind};

use crate::ask::Ask;
use crate::departed::Departed;
use crate::node::NodeState;
use crate::node_account::{NodeAccount, Nominated};
use crate::parts::{self, HeldShare};
use crate::refusal::NodeRefusal;
use crate::reservation::Reservation;
use crate::taste::Taste;
use crate::{choose, multi_gpu, one_gpu};

/// A node as the ledger sees it.
#[derive(Debug, Clone, Copy)]
pub struct LedgerNode<'a> {
    pub(crate) name: &'a str,
    pub(crate) entry: &'a NodeAccount,
    /// The cluster's unit of gpu-mem.
    pub(crate) unit: MemoryUnit,
    /// The departed pods of all nodes by UID.
    pub(crate) all_departed: &'a BTreeMap<String, Departed>,
    /// UID → node → the reservation.
    pub(crate) all_reservations: &'a BTreeMap<String, BTreeMap<String, Reservation>>,
}

impl<'a> LedgerNode<'a> {
    /// Return the node's name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// Return the node's state; `None` while only pods that say they are on the node are known.
    pub fn state(&self) -> Option<&'a NodeState> {
        self.entry.state.as_ref()
    }

    /// Return a number that increases with every change of this node, its pods, or its reservations. It never repeats within one
    /// ledger.
    pub fn version(&self) -> u64 {
        self.entry.version
    }

    /// Return the memory of the GPU at this position of [`NodeState::gpus`] that is allocated to pods and reservations.
    pub fn used(&self, position: usize) -> MiB {
        self.entry.usage.gpus.get(position).copied().unwrap_or(MiB::ZERO)
    }

    /// Return the most memory that is free on one healthy shared GPU.
    pub fn most_free(&self) -> MiB {
        self.entry.usage.most_free
    }

    /// Return the free memory of the GPU at this position, regardless of its health; 0 if more is allocated than it has.
    pub fn free(&self, position: usize) -> MiB {
        self.entry.free(position)
    }

    /// Return the compute time of the GPU at this position that is the share of pods and reservations, in percent. Pods that set no limit have no share.
    pub fn used_cores(&self, position: usize) -> u32 {
        self.entry.usage.cores.get(position).copied().unwrap_or(0)
    }

    /// Return the number of whole GPUs of a kind that pods of this node hold without an allocation, so that it is not known
    /// which they are.
    pub fn unnamed_whole(&self, kind: WholeKind) -> u64 {
        self.entry.unnamed_whole(kind)
    }

    /// Return how many of the [`LedgerNode::unnamed_whole`] GPUs look free. The inventory shows the others as held, although
    /// neither a pod's allocation nor a departed pod explains that.
    ///
    /// A held GPU may instead be in use by a container whose pod is gone. Then too few GPUs are kept free until the container
    /// ends, and a pod without an allocation starts only after that. Even then, no GPU is given to two pods, because the agent
    /// books each GPU before a container starts.
    pub fn unlocated_whole(&self, kind: WholeKind) -> u64 {
        self.entry.unlocated_whole(kind)
    }

    /// Return the nominated pods for which memory of the GPU at this position is kept from the requesting pod, highest priority
    /// first.
    pub fn nominated<'s>(&'s self, position: usize, ask: &'s Ask) -> impl Iterator<Item = &'s Nominated> {
        self.entry.nominated_ahead_of(position, ask)
    }

    /// Return the GPUs of this node that fit best, in ascending order of position.
    ///
    /// # Errors
    /// The refusal says why the pod has no room here.
    pub fn best(&self, taste: &Taste<'_>) -> Result<Vec<usize>, NodeRefusal> {
        choose::best(self.entry, taste)
    }

    /// Among the GPUs at these positions, return the set that works best together, in ascending order. The set has as many GPUs
    /// as the pod requests. Return `None` if too few GPUs have room.
    pub fn best_of(&self, taste: &Taste<'_>, positions: impl IntoIterator<Item = usize>) -> Option<Vec<usize>> {
        multi_gpu::best(self.entry, taste, positions)
    }

    /// Return how much a pod likes the GPU at this position: higher is better. `None` if the pod does not accept the GPU, or if
    /// the GPU has no room.
    pub fn liking(&self, position: usize, taste: &Taste<'_>) -> Option<u64> {
        one_gpu::liking(self.entry, position, taste)
    }

    /// Return the shares that a bound pod holds on this node, one for each GPU.
    pub fn parts(&self, pod: &Pod) -> Vec<HeldShare> {
        self.state()
            .map_or_else(Vec::new, |state| parts::of_pod(pod, state, self.unit))
    }

    /// Return what is kept for departed pods on the GPU at this position ([`crate::Departed`]) as (UID, name, share), largest
    /// share first.
    pub fn departed(&self, position: usize) -> Vec<(String, PodKey, MiB)> {
        if self.entry.departed.is_empty() {
            return Vec::new();
        }
        let Some(state) = &self.entry.state else {
            return Vec::new();
        };
        let mut shares: BTreeMap<&String, MiB> = BTreeMap::new();
        for uid in &self.entry.departed {
            let parts = self
                .all_departed
                .get(uid)
                .map(|departed| parts::of_held(&departed.held, state, self.unit))
                .unwrap_or_default();
            for part in parts.iter().filter(|part| part.position == Some(position)) {
                let share = shares.entry(uid).or_default();
                *share = share.saturating_add(part.memory);
            }
        }
        let mut shares: Vec<(String, PodKey, MiB)> = shares
            .into_iter()
            .filter_map(|(uid, memory)| Some((uid.clone(), self.all_departed.get(uid)?.pod.clone(), memory)))
            .filter(|(_, _, memory)| *memory > MiB::ZERO)
            .collect();
        shares.sort_by(|a, b| (b.2, &a.1, &a.0).cmp(&(a.2, &b.1, &b.0)));
        shares
    }

    /// Return the memory promised beyond what the node's GPUs have, summed over the GPUs. It is greater than 0 only if a capacity
    /// shrank under its pods, or if another client wrote allocations.
    pub fn overcommitted(&self) -> MiB {
        let Some(state) = &self.entry.state else {
            return MiB::ZERO;
        };
        state
            .gpus
            .iter()
            .enumerate()
            .map(|(position, gpu)| self.used(position).saturating_add(gpu.held).saturating_sub(gpu.capacity))
            .fold(MiB::ZERO, MiB::saturating_add)
    }

    /// Return what the node's pods that have not ended request: CPU in thousandths of a core, main memory in bytes, and the
    /// number of pods.
    pub fn requested(&self) -> (u64, u64, u64) {
        let usage = &self.entry.usage;
        (usage.cpu_milli, usage.memory_bytes, usage.pods)
    }

    /// Return the pods bound here that have not ended, ordered by UID.
    pub fn pods(&self) -> impl Iterator<Item = &'a Pod> {
        self.arrivals().map(|(_, pod)| pod)
    }

    /// Return the pods of [`LedgerNode::pods`], each with its arrival number, which is higher the later the pod was seen to be
    /// bound here.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = (u64, &'a Pod)> {
        let pods = self.entry.pods.iter().map(|(pod, arrival)| (*arrival, &*pod.0));
        pods.filter(|(_, pod)| !pod.ended())
    }

    /// Return the reservations on this node, ordered by UID.
    pub fn reserved(&self) -> impl Iterator<Item = (&'a str, &'a Reservation)> {
        let (all, name) = (self.all_reservations, self.name);
        self.entry
            .reserved
            .iter()
            .filter_map(move |uid| Some((uid.as_str(), all.get(uid)?.get(name)?)))
    }
}
