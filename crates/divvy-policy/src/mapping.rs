//! Translates the extender's nodes and pods into the description that the policies use.

use divvy_model::{Health, MiB, Pod, Vendor};

use super::{Demand, DemandShare, FreeOnNode, MOST_GPUS, ModelSet, Models, NodeShape};
use divvy_placement::{Ask, LedgerNode};

/// A group of identical GPUs of one node, which a [`crate::Placer`] treats as a node of its own. All groups of a node share its
/// CPU and main memory, so each group is described as if it had all of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuGroup {
    /// The vendor of the GPUs.
    pub vendor: Vendor,
    /// What the GPUs and the node have when nothing runs on them.
    pub shape: NodeShape,
    /// What is free now.
    pub free: FreeOnNode,
    /// For each position in this group, the GPU's position in [`divvy_placement::NodeState::gpus`].
    pub positions: Vec<usize>,
}

/// Describe a node of the ledger: its healthy shared GPUs, grouped by product and size, with at most [`MOST_GPUS`] in a group.
/// Amounts are in MiB, exactly as the ledger counts them, so a pod that fits here also fits there. The result is empty for a node
/// that is not usable.
///
/// The ledger still decides whether a pod fits, because it knows more: the pod's own reservations, and the GPUs that its rules
/// name.
pub fn from_ledger(view: &LedgerNode<'_>, models: &mut Models) -> Vec<GpuGroup> {
    let Some(state) = view.state().filter(|state| state.unusable(None).is_none()) else {
        return Vec::new();
    };
    let (cpu_used, memory_used, _) = view.requested();
    let mut groups: Vec<GpuGroup> = Vec::new();
    let shared = state.gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_shared());
    for (position, gpu) in shared.filter(|(_, gpu)| gpu.health == Health::Ok) {
        let Some(model) = models.number(&gpu.model) else {
            continue;
        };
        let size = mib(gpu.capacity);
        let like = |group: &&mut GpuGroup| {
            (group.vendor, group.shape.model, group.shape.gpu_size) == (gpu.vendor, model, size)
                && group.positions.len() < MOST_GPUS
        };
        if groups.iter_mut().find(like).is_none() {
            let shape = NodeShape {
                model,
                gpus: 0,
                gpu_size: size,
                cpu_milli: clamp(state.cpu_milli),
                memory_mib: mib(MiB::from_bytes(state.memory_bytes)),
            };
            let free = FreeOnNode {
                cpu_milli: clamp(state.cpu_milli.saturating_sub(cpu_used)),
                memory_mib: mib(MiB::from_bytes(state.memory_bytes.saturating_sub(memory_used))),
                ..shape.empty()
            };
            let positions = Vec::new();
            groups.push(GpuGroup {
                vendor: gpu.vendor,
                shape,
                free,
                positions,
            });
        }
        if let Some(group) = groups.iter_mut().find(like) {
            group.free.gpus[group.positions.len()] = mib(view.free(position)).min(size);
            group.positions.push(position);
            group.shape.gpus += 1;
        }
    }
    for pod in view.pods() {
        count_kind(&mut groups, view, pod);
    }
    groups
}

/// Add a pod to the groups' counts of pods by kind.
fn count_kind(groups: &mut [GpuGroup], view: &LedgerNode<'_>, pod: &Pod) {
    let parts = view.parts(pod);
    for group in groups {
        let here = parts
            .iter()
            .filter(|part| part.position.is_some_and(|position| group.positions.contains(&position)));
        let (count, most) = here.fold((0_usize, 0), |(count, most), part| (count + 1, most.max(mib(part.memory))));
        let kind = match count {
            0 => continue,
            1 if most < group.shape.gpu_size => 0,
            several => several.min(MOST_GPUS),
        };
        group.free.kinds[kind] = group.free.kinds[kind].saturating_add(1);
    }
}

/// Translate a pod's request for the policies. The result is `None` if the requested memory is too large to be counted, or if the pod
/// requests MIG devices, or whole GPUs of a vendor whose GPUs are not shared by default: no policy knows those.
pub fn demand_of(pod: &Pod, ask: &Ask) -> Option<Demand> {
    let share = match ask.whole {
        Some(kind) if kind.is_of_shared_gpus() => DemandShare::WHOLE,
        Some(_) => return None,
        None => DemandShare::Memory(u32::try_from(ask.memory?.0).ok()?),
    };
    Some(Demand {
        cpu_milli: pod.cpu_milli,
        // Rounded up, because free memory is rounded down.
        memory_mib: clamp(pod.memory_bytes.div_ceil(1 << 20)),
        gpus: match share {
            DemandShare::Memory(0) => 0,
            _ => u8::try_from(ask.gpus).ok()?,
        },
        share,
        models: ModelSet::ANY,
    })
}

fn mib(memory: MiB) -> u32 {
    clamp(memory.0)
}

fn clamp(value: u64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}
