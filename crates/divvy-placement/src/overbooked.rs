use divvy_model::{MiB, PodKey};

use crate::{Ledger, NodeView, Source};

/// A GPU of which the pods that are bound to it were promised more than it has. On paper only: the node's agent starts no
/// container for which there is no memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Overbooked {
    /// The node.
    pub node: String,
    /// The GPU's index.
    pub index: u32,
    /// What it has to give ([`crate::GpuState::most`]).
    pub capacity: MiB,
    /// What was promised to pods that are bound and have not ended.
    pub promised: MiB,
    /// Those pods, in the order in which they were seen to be bound.
    pub pods: Vec<Promise>,
}

/// A pod's part of an [`Overbooked`] GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Promise {
    /// The pod.
    pub pod: PodKey,
    /// Its UID.
    pub uid: String,
    /// What it was promised.
    pub memory: MiB,
    /// Some container of it runs.
    pub running: bool,
    /// Its deletion was asked for.
    pub deleting: bool,
}

impl Ledger {
    /// GPUs promised twice, of nodes that changed after this [`Ledger::version`]; in the order of the changes. Reservations
    /// do not count: whether they come true is not known yet. Nor does what containers of vanished pods hold: it is soon free.
    pub fn overbooked_since(&self, version: u64) -> Vec<Overbooked> {
        self.overbooked_nodes(version).flat_map(|view| of_node(&view)).collect()
    }
}

fn of_node(view: &NodeView<'_>) -> Vec<Overbooked> {
    let Some(state) = view.state().filter(|state| !matches!(state.source, Source::Unusable(_))) else {
        return Vec::new();
    };
    let mut arrivals: Vec<_> = view.arrivals().collect();
    arrivals.sort_by_key(|(arrival, _)| *arrival);
    let gpus = state.gpus.iter().enumerate();
    gpus.filter(|(position, gpu)| view.used(*position) > gpu.most)
        .filter_map(|(position, gpu)| {
            let promises = arrivals.iter().filter_map(|(_, pod)| {
                let parts = view.ledger.parts_of(state, pod).into_iter();
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
