//! Whole GPUs: how many must be free for a pod, besides the unknown GPUs that pods without an allocation hold.
//!
//! A pod that was bound without the extender has no allocation, and the kubelet chooses its GPUs. The ledger knows only
//! their number, until the agent's inventory shows them as held. They may be any of the free GPUs of that kind. Therefore as
//! many GPUs must stay free, whether the next pod requests whole GPUs or shares.

use crate::node_account::NodeAccount;
use crate::one_gpu::liking;
use crate::taste::Taste;

/// Report whether enough whole GPUs are free for a pod that requests some. A request for shared memory is not limited by this.
pub(crate) fn enough(entry: &NodeAccount, taste: &Taste<'_>) -> bool {
    let ask = taste.ask();
    let Some(kind) = ask.whole else { return true };
    let gpus = entry.state.as_ref().map_or(0, |state| state.gpus.len());
    let fitting = (0..gpus).filter(|position| liking(entry, *position, taste).is_some());
    let needed = ask.gpus as u64;
    if (fitting.count() as u64) < needed {
        return false;
    }
    let unlocated = entry.unlocated_whole(kind);
    unlocated == 0 || entry.free_whole(kind, ask) >= needed.saturating_add(unlocated)
}
