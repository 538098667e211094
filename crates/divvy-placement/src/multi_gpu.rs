//! Choosing several GPUs of one node for a pod.

use std::cmp::Reverse;
use std::collections::BTreeMap;

use crate::node_account::NodeAccount;
use crate::one_gpu::liking;
use crate::taste::Taste;
use crate::topology::GpuCandidate;

/// Choose as many of the GPUs at these positions as the pod requests, in ascending order; `None` if too few of them have room.
///
/// The GPUs that the pod prefers come first. Next, all chosen GPUs should have the same product and size, if there are enough of
/// one kind. Among the sets that are left, the one that works best together is chosen ([`crate::Topology::choose`]).
pub(crate) fn best(entry: &NodeAccount, taste: &Taste<'_>, among: impl IntoIterator<Item = usize>) -> Option<Vec<usize>> {
    let (state, ask) = (entry.state.as_ref()?, taste.ask());
    let with_liking = among
        .into_iter()
        .filter_map(|position| Some((liking(entry, position, taste)?, position)));
    let mut liked: Vec<(u64, usize)> = with_liking.collect();
    liked.sort_unstable_by_key(|(liking, position)| (Reverse(*liking), *position));
    let spared = entry.spared(liked.iter().map(|(_, position)| *position), ask);
    liked.retain(|(_, position)| spared.contains(position));
    // GPUs that the pod prefers over the last one that it needs are taken in any case, regardless of their connections.
    let (least, _) = *liked.get(ask.gpus.checked_sub(1)?)?;
    liked.retain(|(liking, _)| *liking >= least);
    let candidates: Vec<GpuCandidate> = liked
        .into_iter()
        .map(|(liking, position)| GpuCandidate {
            position,
            free: entry.free_for(position, ask),
            must: liking > least,
        })
        .collect();
    let mut alike: BTreeMap<_, Vec<GpuCandidate>> = BTreeMap::new();
    for candidate in &candidates {
        let gpu = &state.gpus[candidate.position];
        alike.entry((gpu.model.as_str(), gpu.total)).or_default().push(*candidate);
    }
    let musts = candidates.iter().filter(|candidate| candidate.must).count();
    let enough = |of: &&Vec<GpuCandidate>| of.iter().filter(|candidate| candidate.must).count() == musts;
    let sets = alike
        .values()
        .filter(enough)
        .filter_map(|of| state.topology.choose(of, ask.gpus));
    let best = sets.min_by_key(|set| {
        let free = set
            .iter()
            .fold(0_u64, |sum, position| sum.saturating_add(entry.free_for(*position, ask).0));
        (Reverse(state.topology.worth(set)), free, set.clone())
    });
    best.or_else(|| state.topology.choose(&candidates, ask.gpus))
}
