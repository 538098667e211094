//! Whether one GPU of a node has room for a pod, and which of them fits best.

use std::cmp::Reverse;

use crate::node_account::NodeAccount;
use crate::taste::Taste;

/// Return how much a pod likes the GPU at this position: higher is better. `None` if the pod does not accept the GPU, or if the
/// GPU has no room.
pub(crate) fn liking(entry: &NodeAccount, position: usize, taste: &Taste<'_>) -> Option<u64> {
    let ask = taste.ask();
    let state = entry.state.as_ref()?;
    let gpu = state.gpus.get(position)?;
    if ask.is_too_wide_for(state) {
        return None;
    }
    let good = ask.is_well(gpu) && entry.has_room(position, gpu, ask) && taste.takes(gpu);
    (good && !entry.is_kept_free(position, ask)).then(|| gpu.preference(ask.rules().and_then(|rules| rules.prefer)))
}

/// Among the GPUs with room, choose the one that the pod likes most; on a tie, the one with the least free memory; then the one
/// with the lowest index.
pub(crate) fn best(entry: &NodeAccount, taste: &Taste<'_>) -> Option<usize> {
    let gpus = entry.state.as_ref()?.gpus.iter().enumerate();
    gpus.filter_map(|(position, gpu)| {
        let liking = liking(entry, position, taste)?;
        Some((Reverse(liking), entry.free_for(position, taste.ask()), gpu.index, position))
    })
    .min()
    .map(|(.., position)| position)
}
