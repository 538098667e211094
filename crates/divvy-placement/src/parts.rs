//! What a pod holds of a node's GPUs, and what is free on a GPU. The ledger, and every program that shows allocations, compute both here.

use divvy_model::{Held, MemoryUnit, MiB, Pod, WholeKind};

use crate::amount::Amount;
use crate::node_gpus::NodeGpus;

/// A share of a GPU that a pod holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldShare {
    /// The GPU's position in [`NodeGpus`]; `None` if the node has no such GPU.
    pub position: Option<usize>,
    /// The GPU's UUID or index, as the pod's annotation names it.
    pub gpu: String,
    /// The share's size.
    pub memory: MiB,
    /// The share of the compute time in percent; 0 if the pod has no limit.
    pub cores: u32,
    /// Whether the pod has the whole GPU. Then `memory` is all that the GPU offers.
    pub whole: bool,
}

impl HeldShare {
    pub(crate) fn amount(&self) -> Amount {
        Amount {
            memory: self.memory,
            cores: self.cores,
        }
    }

    /// Report whether the part takes memory of any of these GPUs, because it is not known which one it is on: the pod's allocation names a UUID, and no
    /// UUID is known. Where UUIDs are known, the GPU is gone, and its part takes nothing from the other GPUs.
    pub fn is_anywhere(&self, held: &Held, gpus: &impl NodeGpus) -> bool {
        self.position.is_none() && matches!(held, Held::Allocation(_)) && gpus.gpus().all(|gpu| gpu.uuid.is_none())
    }
}

/// Return the free memory of a GPU. `used` is the sum of the pods' parts on the GPU, `anywhere` the sum of the parts that may be on any GPU of the node
/// ([`HeldShare::is_anywhere`]), and `held` what containers of deleted pods hold of the GPU. 0 if that is more than `capacity`.
pub fn free(capacity: MiB, used: MiB, anywhere: MiB, held: MiB) -> MiB {
    capacity.saturating_sub(used).saturating_sub(anywhere).saturating_sub(held)
}

/// Return what a bound pod holds, resolved against a node's GPUs: what its annotations say, or what it requests if that is
/// more. The kubelet gave the pod devices for its whole request, so a smaller amount in the annotations, which some client
/// may have written without the extender, frees nothing. A pod that was bound before the unit was made larger requested in
/// the former unit; the node's agent reports which units that may be.
pub fn of_pod(pod: &Pod, gpus: &impl NodeGpus, unit: MemoryUnit) -> Vec<HeldShare> {
    let mut parts = of_held(&pod.held, gpus, unit);
    let capacity = |part: &HeldShare| part.position.and_then(|position| gpus.gpu(position)).map(|gpu| gpu.capacity);
    if pod.request.whole.is_some() && !pod.request.wants_memory() {
        // Whatever the annotation says, the kubelet gave the pod devices that stand for whole GPUs.
        for part in &mut parts {
            part.memory = capacity(part).unwrap_or(part.memory);
            part.whole = true;
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
    if held < asked && gpus.former_unit(pod).is_none() {
        let each = MiB(asked.0.div_ceil(parts.len() as u64));
        for part in &mut parts {
            // A pod that was bound with a larger number of smaller units cannot hold more than the GPU has.
            part.memory = part.memory.max(capacity(part).map_or(each, |capacity| each.min(capacity)));
        }
    }
    parts
}

/// Return what an allocation holds, resolved against a node's GPUs.
pub(crate) fn of_held(held: &Held, gpus: &impl NodeGpus, unit: MemoryUnit) -> Vec<HeldShare> {
    match held {
        Held::Nothing | Held::Unreadable(_) => Vec::new(),
        Held::Allocation(allocation) => allocation
            .gpus
            .iter()
            .map(|share| {
                let position = gpus.by_uuid(&share.uuid);
                let gpu = position.and_then(|position| gpus.gpu(position));
                let whole = share.whole || gpu.is_some_and(|gpu| !gpu.is_shared);
                HeldShare {
                    position,
                    gpu: share.uuid.clone(),
                    cores: share.cores,
                    memory: match gpu {
                        // One pod has all of it, even if the driver reported another size when the pod was bound.
                        Some(gpu) if whole => gpu.capacity,
                        _ => share.memory,
                    },
                    whole,
                }
            })
            .collect(),
        Held::Legacy(legacy) => legacy
            .gpus
            .iter()
            .map(|(index, units)| HeldShare {
                position: gpus.by_index(*index),
                gpu: index.to_string(),
                cores: 0,
                memory: unit.memory(*units).unwrap_or(MiB(u64::MAX)),
                whole: false,
            })
            .collect(),
    }
}

/// Return how many whole GPUs a bound pod requests beyond the GPUs that its allocation names, and their kind.
pub fn unnamed(pod: &Pod, gpus: &impl NodeGpus, parts: &[HeldShare]) -> Option<(WholeKind, u64)> {
    let request = pod.request.whole.as_deref()?;
    // A GPU that the node does not have any longer is named as well: the pod holds no other in its place.
    let named = parts.iter().filter(|part| {
        let gpu = part.position.and_then(|position| gpus.gpu(position));
        gpu.is_none_or(|gpu| gpu.whole == Some(request.kind))
    });
    let unnamed = request.gpus().unwrap_or(u64::MAX).saturating_sub(named.count() as u64);
    (unnamed > 0).then_some((request.kind, unnamed))
}
