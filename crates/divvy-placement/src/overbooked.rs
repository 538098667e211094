use divvy_model::{MiB, PodKey};

use crate::ledger::Ledger;
use crate::node_view::LedgerNode;

/// A GPU of which more memory is promised to bound pods than it has. This is only on paper: the node's agent does not start a
/// container for which no memory is free.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overbooked {
    /// The node's name.
    pub node: String,
    /// The GPU's NVML index.
    pub index: u32,
    /// The memory that the GPU offers ([`crate::GpuState::most`]).
    pub capacity: MiB,
    /// The memory promised to pods that are bound and have not ended.
    pub promised: MiB,
    /// These pods, in the order in which they were seen to be bound.
    pub pods: Vec<Promise>,
}

/// A pod's part of an [`Overbooked`] GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promise {
    pub pod: PodKey,
    pub uid: String,
    /// The memory promised to the pod.
    pub memory: MiB,
    /// Whether a container of the pod runs.
    pub running: bool,
    /// Whether the pod is being deleted.
    pub deleting: bool,
}

impl Ledger {
    /// Return the overbooked GPUs of nodes that changed after this [`Ledger::version`], in the order of the changes. Reservations
    /// do not count, because they may not take effect. Memory that containers of departed pods hold does not count either,
    /// because it will soon be free.
    pub fn overbooked_since(&self, version: u64) -> Vec<Overbooked> {
        self.overbooked_nodes(version).flat_map(|view| of_node(&view)).collect()
    }
}

fn of_node(view: &LedgerNode<'_>) -> Vec<Overbooked> {
    let Some(state) = view.state() else {
        return Vec::new();
    };
    let mut arrivals: Vec<_> = view.arrivals().collect();
    arrivals.sort_by_key(|(arrival, _)| *arrival);
    let gpus = state.gpus.iter().enumerate();
    let offered = gpus.filter(|(_, gpu)| state.is_offered(gpu));
    offered
        .filter(|(position, gpu)| view.used(*position) > gpu.most)
        .filter_map(|(position, gpu)| {
            let promises = arrivals.iter().filter_map(|(_, pod)| {
                let parts = view.parts(pod).into_iter();
                let memory = parts
                    .filter(|part| part.position == Some(position))
                    .fold(MiB::ZERO, |sum, part| sum.saturating_add(part.memory));
                (memory > MiB::ZERO).then(|| Promise {
                    pod: pod.key(),
                    uid: pod.uid.clone(),
                    memory,
                    running: pod.container_running,
                    deleting: pod.deleting,
                })
            });
            let pods: Vec<Promise> = promises.collect();
            let promised = pods.iter().fold(MiB::ZERO, |sum, promise| sum.saturating_add(promise.memory));
            (promised > gpu.most).then(|| Overbooked {
                node: view.name().to_owned(),
                index: gpu.index,
                capacity: gpu.most,
                promised,
                pods,
            })
        })
        .collect()
}
