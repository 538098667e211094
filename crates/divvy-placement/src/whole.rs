//! Whole GPUs: how many must be free, next to those that pods hold without saying which.
//!
//! A pod that was bound without the extender has no allocation, and the kubelet chooses its GPUs. The ledger knows only their
//! number. They may be any of the vendor's free GPUs, so as many must stay free.

use divvy_model::{Pod, Vendor};

use crate::ledger::{Part, Usage};
use crate::products::Taste;
use crate::{Ask, NodeState, NodeView};

impl NodeView<'_> {
    /// Return the number of a vendor's whole GPUs that pods of this node hold without an allocation, so that it is not known
    /// which they are.
    pub fn unnamed_whole(&self, vendor: Vendor) -> u64 {
        self.entry.usage.unnamed_whole.get(&vendor).copied().unwrap_or(0)
    }

    /// Return how many GPUs must have room for the pod: as many as it requests, and those of [`NodeView::unnamed_whole`].
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
    let free = (0..gpus).filter(|position| view.liking(*position, taste).is_some());
    free.count() >= view.needed(ask)
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
