//! The ranking of nodes for pods that request whole GPUs. It is the same under every policy.

use divvy_model::Pod;
use divvy_placement::{Ask, Ledger, LedgerNode, Taste};

use crate::{Cost, Ranking, rank as hash};

/// Rank these nodes. The cost is the number of free GPUs that the pod accepts. Only the nodes that can serve the pod with GPUs
/// that it likes most get a cost.
pub(crate) fn rank<'n>(pod: &Pod, ask: &Ask, nodes: impl IntoIterator<Item = &'n str>, ledger: &Ledger) -> Ranking {
    let taste = Taste::of(ask);
    let question = ledger.question(ask, &pod.uid);
    let free: Vec<(&str, Option<(u64, i64)>)> = nodes
        .into_iter()
        .map(|node| {
            let fits = question.fits(node).is_ok();
            let view = ledger.node(node).filter(|_| fits);
            (node, view.and_then(|view| free_on(&view, &taste)))
        })
        .collect();
    let most = free.iter().filter_map(|(_, free)| Some(free.as_ref()?.0)).max();
    let cost = |free: &Option<(u64, i64)>| {
        let (_, amount) = free.filter(|(liking, _)| Some(*liking) == most)?;
        Some(Cost { amount, exact: true })
    };
    let costs: Vec<Option<Cost>> = free.iter().map(|(_, free)| cost(free)).collect();
    let known = costs
        .iter()
        .enumerate()
        .filter_map(|(at, cost)| Some((at, cost.as_ref()?.amount)));
    let best = known.min_by_key(|(at, amount)| (*amount, free.get(*at).map(|(node, _)| (hash(node), *node))));
    Ranking {
        best: best.map(|(at, _)| at),
        costs,
    }
}

/// Return how much the pod likes the least preferred of the GPUs that it would get, and the number of free GPUs that it accepts.
/// The result is `None` if there are too few.
fn free_on(view: &LedgerNode<'_>, taste: &Taste<'_>) -> Option<(u64, i64)> {
    let gpus = view.state()?.gpus.len();
    let mut likings: Vec<u64> = (0..gpus).filter_map(|position| view.liking(position, taste)).collect();
    likings.sort_unstable_by(|a, b| b.cmp(a));
    let last = likings.get(taste.ask().gpus.checked_sub(1)?)?;
    Some((*last, i64::try_from(likings.len()).unwrap_or(i64::MAX)))
}
