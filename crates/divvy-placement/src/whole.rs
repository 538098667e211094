//! Whole GPUs: how many must be free, next to those that pods hold without saying which.
//!
//! A pod that was bound without the extender has no allocation, and the kubelet chooses its GPUs. The ledger knows only their
//! number, until the agent's inventory shows their GPUs as held. They may be any of the vendor's free GPUs, so as many must stay free.

use divvy_model::{MiB, Pod, Vendor};

use crate::ledger::{Part, Usage};
use crate::products::Taste;
use crate::{Ask, NodeState, NodeView};

impl NodeView<'_> {
    /// Return the number of a vendor's whole GPUs that pods of this node hold without an allocation, so that it is not known
    /// which they are.
    pub fn unnamed_whole(&self, vendor: Vendor) -> u64 {
        self.entry.usage.unnamed_whole.get(&vendor).copied().unwrap_or(0)
    }

    /// Return how many of the [`NodeView::unnamed_whole`] are on GPUs that look free. The others are on GPUs that the inventory shows as held,
    /// although neither a pod's allocation nor a departed pod explains it.
    ///
    /// A held GPU may also be that of a container whose pod is gone. Then too few are kept free until the container ends, and a pod without
    /// an allocation starts only after that. No GPU is given to two pods, because the agent books each GPU before a container starts.
    pub fn unlocated_whole(&self, vendor: Vendor) -> u64 {
        let usage = &self.entry.usage;
        let explained = |memory: &[MiB], position: usize| memory.get(position).is_some_and(|memory| *memory > MiB::ZERO);
        let gpus = self.state().map(|state| state.gpus.as_slice()).unwrap_or_default();
        let located = gpus.iter().enumerate().filter(|(position, gpu)| {
            gpu.offered_as() == Some(vendor)
                && gpu.held > MiB::ZERO
                && !explained(&usage.gpus, *position)
                && !explained(&usage.departed, *position)
        });
        self.unnamed_whole(vendor).saturating_sub(located.count() as u64)
    }

    /// Return how many GPUs must have room for the pod once all held GPUs are free: as many as it requests, and those of
    /// [`NodeView::unnamed_whole`].
    pub(crate) fn needed(&self, ask: &Ask) -> usize {
        let unnamed = ask.whole.map_or(0, |vendor| self.unnamed_whole(vendor));
        ask.gpus.saturating_add(usize::try_from(unnamed).unwrap_or(usize::MAX))
    }
}

/// Report whether enough whole GPUs are free for a pod that requests some. A request for shared memory is not limited by this.
pub(crate) fn enough(view: &NodeView<'_>, taste: &Taste<'_>) -> bool {
    let ask = taste.ask();
    if ask.whole.is_none() {
        return true;
    }
    let gpus = view.state().map_or(0, |state| state.gpus.len());
    let free = (0..gpus).filter(|position| view.liking(*position, taste).is_some()).count() as u64;
    let taken = ask.whole.map_or(0, |vendor| view.unlocated_whole(vendor));
    free >= (ask.gpus as u64).saturating_add(taken)
}

/// Return how many whole GPUs a bound pod requests beyond those that its allocation names, and of which vendor.
pub(crate) fn unnamed(state: &NodeState, pod: &Pod, parts: &[Part]) -> Option<(Vendor, u64)> {
    let request = pod.request.whole.as_deref()?;
    // A GPU that the node does not have any longer is named as well: the pod holds no other in its place.
    let named = parts.iter().filter(|part| {
        let gpu = part.position.and_then(|position| state.gpus.get(position));
        gpu.is_none_or(|gpu| gpu.offered_as() == Some(request.vendor))
    });
    let unnamed = request.gpus().unwrap_or(u64::MAX).saturating_sub(named.count() as u64);
    (unnamed > 0).then_some((request.vendor, unnamed))
}

impl Usage {
    pub(crate) fn add_unnamed(&mut self, unnamed: Option<(Vendor, u64)>) {
        if let Some((vendor, gpus)) = unnamed {
            let sum = self.unnamed_whole.entry(vendor).or_default();
            *sum = sum.saturating_add(gpus);
        }
    }
}
