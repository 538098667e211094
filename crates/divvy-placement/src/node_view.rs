use divvy_model::{MiB, Pod, PodKey};

use crate::ledger::{Entry, Oddities, Part};
use crate::{Ledger, NodeState, Reservation};

/// A node as the ledger sees it.
#[derive(Debug, Clone, Copy)]
pub struct NodeView<'a> {
    pub(crate) ledger: &'a Ledger,
    pub(crate) name: &'a str,
    pub(crate) entry: &'a Entry,
}

impl<'a> NodeView<'a> {
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
        self.free_beside(position, MiB::ZERO)
    }

    /// Return the free memory as [`NodeView::free`] does, as if `own` were not allocated there.
    pub(crate) fn free_beside(&self, position: usize, own: MiB) -> MiB {
        self.entry.free_beside(position, own)
    }

    /// Return the free memory as [`NodeView::free`] does, as if nothing were kept for departed pods.
    pub(crate) fn free_without_departed(&self, position: usize) -> MiB {
        self.entry.free_beside_and_kept(position, MiB::ZERO, MiB::ZERO)
    }

    /// Return the shares that a bound pod holds on this node, one for each GPU.
    pub fn parts(&self, pod: &Pod) -> Vec<Part> {
        self.state().map_or_else(Vec::new, |state| self.ledger.parts_of(state, pod))
    }

    /// Return what is kept for departed pods on the GPU at this position ([`crate::Departed`]) as (UID, name, share), largest
    /// share first.
    pub fn departed(&self, position: usize) -> Vec<(String, PodKey, MiB)> {
        if self.entry.departed.is_empty() {
            return Vec::new();
        }
        self.ledger.departed_of(self.name, position)
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

    /// Return the pods of [`NodeView::pods`], each with its arrival number, which is higher the later the pod was seen to be
    /// bound here.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = (u64, &'a Pod)> {
        let pods = self.entry.pods.iter().map(|(pod, arrival)| (*arrival, &*pod.0));
        pods.filter(|(_, pod)| !pod.ended())
    }

    pub(crate) fn oddities(&self) -> Oddities {
        self.entry.usage.oddities
    }

    /// Return the reservations on this node, ordered by UID.
    pub fn reserved(&self) -> impl Iterator<Item = (&'a str, &'a Reservation)> {
        let (ledger, name) = (self.ledger, self.name);
        self.entry
            .reserved
            .iter()
            .filter_map(move |uid| Some((uid.as_str(), ledger.reservation(uid, name)?)))
    }
}
