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
    /// The node's name.
    pub fn name(&self) -> &'a str {
        self.name
    }

    /// The node; `None` while only pods that say they are on it are known.
    pub fn state(&self) -> Option<&'a NodeState> {
        self.entry.state.as_ref()
    }

    /// Rises with every change of this node, its pods or its reservations; never repeats within one ledger.
    pub fn version(&self) -> u64 {
        self.entry.version
    }

    /// Allocated on the GPU at this position of [`NodeState::gpus`], by pods and reservations.
    pub fn used(&self, position: usize) -> MiB {
        self.entry.usage.gpus.get(position).copied().unwrap_or(MiB::ZERO)
    }

    /// The most that is left on one GPU that is well.
    pub fn most_free(&self) -> MiB {
        self.entry.usage.most_free
    }

    /// Left on the GPU at this position, whatever its health; zero, never less, when more is allocated than there is.
    pub fn free(&self, position: usize) -> MiB {
        self.free_beside(position, MiB::ZERO)
    }

    /// As [`NodeView::free`], as if this much of what is allocated there were not.
    pub(crate) fn free_beside(&self, position: usize, own: MiB) -> MiB {
        self.entry.free_beside(position, own)
    }

    /// As [`NodeView::free`], as if nothing were kept for pods that departed.
    pub(crate) fn free_without_departed(&self, position: usize) -> MiB {
        self.entry.free_beside_and_kept(position, MiB::ZERO, MiB::ZERO)
    }

    /// Return the shares that a bound pod holds on this node, one for each GPU.
    pub fn parts(&self, pod: &Pod) -> Vec<Part> {
        self.state().map_or_else(Vec::new, |state| self.ledger.parts_of(state, pod))
    }

    /// Kept for pods that departed from the GPU at this position ([`crate::Departed`]): UID, name, share; the largest first.
    pub fn departed(&self, position: usize) -> Vec<(String, PodKey, MiB)> {
        if self.entry.departed.is_empty() {
            return Vec::new();
        }
        self.ledger.departed_of(self.name, position)
    }

    /// Memory promised beyond what the node's GPUs have, in all. Not zero only when a capacity shrank under its pods or
    /// somebody else wrote allocations.
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

    /// Requested CPU in thousandths of a core, main memory in bytes and number of the node's pods that have not ended.
    pub fn requested(&self) -> (u64, u64, u64) {
        let usage = &self.entry.usage;
        (usage.cpu_milli, usage.memory_bytes, usage.pods)
    }

    /// The pods bound here that have not ended, by UID.
    pub fn pods(&self) -> impl Iterator<Item = &'a Pod> {
        self.arrivals().map(|(_, pod)| pod)
    }

    /// As [`NodeView::pods`], each with a number that is higher the later the pod was seen to be bound here.
    pub(crate) fn arrivals(&self) -> impl Iterator<Item = (u64, &'a Pod)> {
        let pods = self.entry.pods.iter().map(|(pod, arrival)| (*arrival, &*pod.0));
        pods.filter(|(_, pod)| !pod.ended())
    }

    pub(crate) fn oddities(&self) -> Oddities {
        self.entry.usage.oddities
    }

    /// The reservations here, by UID.
    pub fn reserved(&self) -> impl Iterator<Item = (&'a str, &'a Reservation)> {
        let (ledger, name) = (self.ledger, self.name);
        self.entry
            .reserved
            .iter()
            .filter_map(move |uid| Some((uid.as_str(), ledger.reservation(uid, name)?)))
    }
}
