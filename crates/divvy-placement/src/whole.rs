//! Whole GPUs: how many must be free for a pod, besides the unknown GPUs that pods without an allocation hold.
//!
//! A pod that was bound without the extender has no allocation, and the kubelet chooses its GPUs. The ledger knows only their
//! number, until the agent's inventory shows them as held. They may be any of the vendor's free GPUs, so that many GPUs must stay
//! free.

use crate::node_account::NodeAccount;
use crate::one_gpu::liking;
use crate::taste::Taste;

/// Report whether enough whole GPUs are free for a pod that requests some. A request for shared memory is not limited by this.
pub(crate) fn enough(entry: &NodeAccount, taste: &Taste<'_>) -> bool {
    let ask = taste.ask();
    if ask.whole.is_none() {
        return true;
    }
    let gpus = entry.state.as_ref().map_or(0, |state| state.gpus.len());
    let free = (0..gpus).filter(|position| liking(entry, *position, taste).is_some());
    let taken = ask.whole.map_or(0, |vendor| entry.unlocated_whole(vendor));
    free.count() as u64 >= (ask.gpus as u64).saturating_add(taken)
}
