//! What a pod holds, resolved against the GPUs of a node.

use divvy_model::{Held, MemoryUnit, MiB, Pod, WholeKind};

use crate::amount::Amount;
use crate::node::NodeState;

/// A share of a GPU that a pod holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The GPU's position in [`NodeState::gpus`]; `None` if the node has no such GPU.
    pub position: Option<usize>,
    /// The GPU's UUID or index, as the pod's annotation names it.
    pub gpu: String,
    /// The share's size.
    pub memory: MiB,
    /// The share of the compute time in percent; 0 if the pod has no limit.
    pub cores: u32,
}

impl Part {
    pub(crate) fn amount(&self) -> Amount {
        Amount {
            memory: self.memory,
            cores: self.cores,
        }
    }
}

/// Return what a bound pod holds, resolved against a node's GPUs: what its annotations say, or what it requests if that is
/// more. The kubelet gave the pod devices for its whole request, so a smaller amount in the annotations, which some client
/// may have written without the extender, frees nothing. A pod that was bound before the unit was made larger requested in
/// the former unit; the node's agent reports which units that may be.
pub(crate) fn of_pod(pod: &Pod, state: &NodeState, unit: MemoryUnit) -> Vec<Part> {
    let mut parts = of_held(&pod.held, state, unit);
    if pod.request.whole.is_some() && !pod.request.wants_memory() {
        // Whatever the annotation says, the kubelet gave the pod devices that stand for whole GPUs.
        for part in &mut parts {
            let gpu = part.position.and_then(|position| state.gpus.get(position));
            part.memory = gpu.map_or(part.memory, |gpu| gpu.capacity);
        }
        // The agent does not follow gpushare's annotations for whole GPUs.
        if matches!(pod.held, Held::Legacy(_)) {
            parts.clear();
        }
    }
    if parts.is_empty() || !pod.request.wants_memory() {
        return parts;
    }
    let asked = pod
        .request
        .effective_units()
        .and_then(|units| unit.memory(units))
        .unwrap_or(MiB(u64::MAX));
    let held = parts.iter().fold(MiB::ZERO, |sum, part| sum.saturating_add(part.memory));
    if held < asked && state.former_unit(pod).is_none() {
        let each = MiB(asked.0.div_ceil(parts.len() as u64));
        for part in &mut parts {
            // A pod that was bound with a larger number of smaller units cannot hold more than the GPU has.
            let gpu = part.position.and_then(|position| state.gpus.get(position));
            part.memory = part.memory.max(gpu.map_or(each, |gpu| each.min(gpu.capacity)));
        }
    }
    parts
}

/// Return what an allocation holds, resolved against a node's GPUs.
pub(crate) fn of_held(held: &Held, state: &NodeState, unit: MemoryUnit) -> Vec<Part> {
    match held {
        Held::Nothing | Held::Unreadable(_) => Vec::new(),
        Held::Allocation(allocation) => allocation
            .gpus
            .iter()
            .map(|share| {
                let position = state.by_uuid(&share.uuid);
                let gpu = position.and_then(|position| state.gpus.get(position));
                Part {
                    position,
                    gpu: share.uuid.clone(),
                    cores: share.cores,
                    memory: match gpu {
                        // One pod has all of it, even if the driver reported another size when the pod was bound.
                        Some(gpu) if share.whole || !gpu.is_shared() => gpu.capacity,
                        _ => share.memory,
                    },
                }
            })
            .collect(),
        Held::Legacy(legacy) => legacy
            .gpus
            .iter()
            .map(|(index, units)| Part {
                position: state.by_index(*index),
                gpu: index.to_string(),
                cores: 0,
                memory: unit.memory(*units).unwrap_or(MiB(u64::MAX)),
            })
            .collect(),
    }
}

/// Return how many whole GPUs a bound pod requests beyond the GPUs that its allocation names, and their kind.
pub(crate) fn unnamed(pod: &Pod, state: &NodeState, parts: &[Part]) -> Option<(WholeKind, u64)> {
    let request = pod.request.whole.as_deref()?;
    // A GPU that the node does not have any longer is named as well: the pod holds no other in its place.
    let named = parts.iter().filter(|part| {
        let gpu = part.position.and_then(|position| state.gpus.get(position));
        gpu.is_none_or(|gpu| gpu.whole == Some(request.kind))
    });
    let unnamed = request.gpus().unwrap_or(u64::MAX).saturating_sub(named.count() as u64);
    (unnamed > 0).then_some((request.kind, unnamed))
}
