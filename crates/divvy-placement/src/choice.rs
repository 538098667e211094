//! The GPUs that a pod gets on a node, and the allocation that is written to the pod for them.

use divvy_model::legacy::LegacyAllocation;
use divvy_model::{Allocation, ContainerShare, Enforcement, GpuShare, Held, MemoryUnit, MiB, PodRequest, WholeRequest};

use crate::ask::Ask;
use crate::node::{GpuState, NodeState};

/// The chosen GPUs of a node, and the memory that the pod gets there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Choice {
    /// The node's name.
    pub node: String,
    /// The chosen GPUs, as many as requested, in ascending order of index.
    pub gpus: Vec<ChosenGpu>,
    /// The number of units that the pod gets in total.
    pub units: u64,
    /// The memory that the pod gets of each GPU; 0 for whole GPUs ([`ChosenGpu::whole`]).
    pub memory: MiB,
    /// The compute time that the pod gets of each GPU, in percent; 0 if it sets no limit.
    pub cores: u32,
}

/// A GPU of a [`Choice`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChosenGpu {
    /// The GPU's UUID; `None` if it is not known.
    pub uuid: Option<String>,
    /// The index among the vendor's GPUs.
    pub index: u32,
    /// The GPU's memory if the pod gets the whole GPU; `None` for a share.
    pub whole: Option<MiB>,
    /// What holds the pod to its share; `None` if nothing does.
    pub enforcement: Option<Enforcement>,
}

impl Choice {
    /// Return the choice of the GPUs at these positions of [`NodeState::gpus`], with this much memory of each.
    pub(crate) fn of(state: &NodeState, positions: &[usize], ask: &Ask, memory: MiB) -> Choice {
        let gpus = positions.iter().filter_map(|position| state.gpus.get(*position));
        let gpu = |gpu: &GpuState| ChosenGpu {
            uuid: gpu.uuid.clone(),
            index: gpu.index,
            whole: ask.whole.map(|_| gpu.capacity),
            enforcement: gpu.enforcement.filter(|_| ask.wants_enforcement()),
        };
        Choice {
            node: state.name.clone(),
            gpus: gpus.map(gpu).collect(),
            units: ask.units,
            memory,
            cores: ask.cores,
        }
    }

    /// Return the allocation to write to the pod. For shared GPUs, it has the same amount of each GPU, for the pod and for
    /// each of its containers. Whole GPUs are divided among the containers ([`WholeRequest::gpus_of`]). On a node known only
    /// by gpushare's capacities, a GPU has no name other than its index, so gpushare's form is all that can be written
    /// truthfully. Both the extender and the node can resolve the index later.
    pub fn held(&self, request: &PodRequest, unit: MemoryUnit) -> Held {
        let count = self.gpus.len().max(1) as u64;
        let uuids: Option<Vec<&String>> = self.gpus.iter().map(|gpu| gpu.uuid.as_ref()).collect();
        let Some(uuids) = uuids else {
            let gpus = self.gpus.iter().map(|gpu| (gpu.index, self.units / count));
            return Held::Legacy(LegacyAllocation { gpus: gpus.collect() });
        };
        if let Some(request) = request
            .whole
            .as_deref()
            .filter(|_| self.gpus.iter().any(|gpu| gpu.whole.is_some()))
        {
            return Held::Allocation(self.whole(request, &uuids));
        }
        let containers = request.memory_containers().map(|container| {
            // This is not more than the pod's share, which was countable.
            let memory = unit.memory(container.units.div_ceil(count)).unwrap_or(self.memory);
            let share = |uuid: &&String| ContainerShare {
                uuid: (*uuid).clone(),
                memory,
                cores: self.cores,
            };
            (container.name.clone(), uuids.iter().map(share).collect())
        });
        let share = |(uuid, gpu): (&&String, &ChosenGpu)| GpuShare {
            uuid: (*uuid).clone(),
            memory: self.memory,
            cores: self.cores,
            whole: false,
            enforcement: gpu.enforcement,
        };
        Held::Allocation(Allocation {
            v: 1,
            containers: containers.collect(),
            gpus: uuids.iter().zip(&self.gpus).map(share).collect(),
        })
    }

    fn whole(&self, request: &WholeRequest, uuids: &[&String]) -> Allocation {
        let memory = |at: usize| self.gpus.get(at).and_then(|gpu| gpu.whole).unwrap_or(self.memory);
        let containers = request.gpus_of().into_iter().map(|(container, range)| {
            let own = uuids.iter().enumerate().filter(|(at, _)| range.contains(&(*at as u64)));
            let share = |(at, uuid): (usize, &&String)| ContainerShare {
                uuid: (*uuid).clone(),
                memory: memory(at),
                cores: 0,
            };
            (container.name.clone(), own.map(share).collect())
        });
        let share = |(at, uuid): (usize, &&String)| GpuShare {
            uuid: (*uuid).clone(),
            memory: memory(at),
            cores: 0,
            whole: true,
            enforcement: None,
        };
        Allocation {
            v: 1,
            containers: containers.collect(),
            gpus: uuids.iter().enumerate().map(share).collect(),
        }
    }
}
