//! Whole GPUs: how many must be free for a pod, besides the unknown GPUs that pods without an allocation hold.
//!
//! A pod that was bound without the extender has no allocation, and the kubelet chooses its GPUs. The ledger knows only their
//! number, until the agent's inventory shows them as held. They may be any of the vendor's free GPUs, so that many GPUs must stay
//! free, whether a pod requests whole GPUs or shares.

use divvy_model::{Health, Vendor};

use crate::node_account::NodeAccount;
use crate::one_gpu::liking;
use crate::taste::Taste;

/// Report whether enough whole GPUs are free for a pod that requests some. A request for shared memory is not limited by this.
pub(crate) fn enough(entry: &NodeAccount, taste: &Taste<'_>) -> bool {
    let ask = taste.ask();
    let Some(vendor) = ask.whole else { return true };
    let gpus = entry.state.as_ref().map_or(0, |state| state.gpus.len());
    let free = (0..gpus).filter(|position| liking(entry, *position, taste).is_some());
    free.count() as u64 >= (ask.gpus as u64).saturating_add(entry.unlocated_whole(vendor))
}

/// Report whether shares must stay off the GPU at this position: nothing is booked on it, and if a pod got shares of `gpus` such GPUs, there
/// would be fewer free GPUs than pods without an allocation hold.
pub(crate) fn is_kept_free(entry: &NodeAccount, position: usize, gpus: usize) -> bool {
    // Few nodes have such pods, and those only for seconds.
    if entry.usage.unnamed_whole.is_empty() {
        return false;
    }
    let state = entry.state.as_ref();
    let Some(gpu) = state.and_then(|state| state.gpus.get(position)).filter(|gpu| gpu.whole) else {
        return false;
    };
    let unlocated = entry.unlocated_whole(gpu.vendor);
    let is_free = entry.free(position) >= gpu.capacity;
    unlocated > 0 && is_free && free(entry, gpu.vendor) < unlocated.saturating_add(gpus as u64)
}

/// Return the number of a vendor's healthy GPUs that are offered as a whole and on which nothing is booked.
fn free(entry: &NodeAccount, vendor: Vendor) -> u64 {
    let gpus = entry.state.iter().flat_map(|state| state.gpus.iter().enumerate());
    let free = gpus
        .filter(|(position, gpu)| gpu.is_whole_of(vendor) && gpu.health == Health::Ok && entry.free(*position) >= gpu.capacity);
    free.count() as u64
}
