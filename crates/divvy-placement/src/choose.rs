//! Whether a node takes a pod, and on which of its GPUs.

use divvy_model::MiB;

use crate::ask::Ask;
use crate::node::NodeState;
use crate::node_account::NodeAccount;
use crate::refusal::NodeRefusal;
use crate::taste::Taste;
use crate::{multi_gpu, one_gpu, whole};

/// Return the node's state, and the memory that is requested of each GPU. Fail if the node does not offer GPUs
/// of the requested kind.
pub(crate) fn offered<'a>(entry: &'a NodeAccount, taste: &Taste<'_>) -> Result<(&'a NodeState, MiB), NodeRefusal> {
    let ask = taste.ask();
    let state = entry.state.as_ref().ok_or(NodeRefusal::UnknownNode)?;
    if ask.is_left_to_another_plugin(state) {
        return Ok((state, MiB::ZERO));
    }
    if let Some(why) = state.unusable(ask.whole) {
        return Err(NodeRefusal::Unusable(why.clone()));
    }
    if let Some(kind) = ask.whole.filter(|_| !state.gpus.iter().any(|gpu| ask.is_for(gpu))) {
        return Err(NodeRefusal::NoneOfKind(kind));
    }
    if let Some(Err(error)) = ask.rules.as_deref() {
        return Err(NodeRefusal::Unreadable(error.clone()));
    }
    let mut shared = state.gpus.iter().filter(|gpu| gpu.is_shared()).peekable();
    if ask.whole.is_none() && shared.peek().is_some() && !shared.any(|gpu| ask.is_of_vendor(gpu)) {
        return Err(NodeRefusal::OtherVendor(ask.vendor()));
    }
    if ask.is_too_wide_for_parts_of(state) {
        return Err(NodeRefusal::OnlyMigDevices);
    }
    if ask.rules.is_some() && state.gpus.iter().filter(|gpu| taste.takes(gpu)).take(ask.gpus).count() < ask.gpus {
        return Err(NodeRefusal::NoGpuTaken(ask.clone()));
    }
    if ask.is_too_wide_for(state) {
        return Err(NodeRefusal::OneGpuOnly);
    }
    Ok((state, ask.memory.ok_or_else(|| NodeRefusal::Uncountable(ask.clone()))?))
}

/// Return the refusal for too few GPUs with room.
pub(crate) fn short(ask: &Ask) -> NodeRefusal {
    match ask.gpus {
        _ if ask.whole.is_some() => NodeRefusal::TooFewWhole(ask.clone()),
        1 if ask.cores == 0 => NodeRefusal::NoGpuFits,
        _ => NodeRefusal::TooFewFit(ask.clone()),
    }
}

/// Choose the GPUs of a node for a pod, as positions in ascending order; none if another device plugin chooses them.
pub(crate) fn best(entry: &NodeAccount, taste: &Taste<'_>) -> Result<Vec<usize>, NodeRefusal> {
    let (state, _) = offered(entry, taste)?;
    let positions = match taste.ask().gpus {
        _ if taste.ask().is_left_to_another_plugin(state) => Some(Vec::new()),
        _ if !whole::enough(entry, taste) => None,
        1 => one_gpu::best(entry, taste).map(|position| vec![position]),
        _ => multi_gpu::best(entry, taste, 0..state.gpus.len()),
    };
    positions.ok_or_else(|| short(taste.ask()))
}
