//! The sums of a node: what its pods hold of each GPU, and what else they request.

use std::collections::BTreeMap;

use divvy_model::{Held, MemoryUnit, MiB, Pod, WholeKind};

use crate::node::NodeState;
use crate::parts::{self, HeldShare};

/// What is taken on a node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TakenUsage {
    /// Memory taken per GPU, in the order of [`NodeState::gpus`].
    pub(crate) gpus: Box<[MiB]>,
    /// Compute time taken per GPU, in percent; empty if no pod has a share of it, as on most nodes. A share ends with the pod, even if a container still
    /// runs.
    pub(crate) cores: Box<[u32]>,
    /// Memory allocated on a node whose GPUs' UUIDs are not known. It may be on any of its GPUs.
    pub(crate) anywhere: MiB,
    /// Memory kept per GPU for departed pods.
    pub(crate) departed: Box<[MiB]>,
    /// Memory kept for departed pods on a node whose GPUs' UUIDs are not known.
    pub(crate) departed_anywhere: MiB,
    /// The most memory that a share can have of one healthy GPU.
    pub(crate) most_free: MiB,
    /// The number of whole GPUs and MIG devices per kind that pods hold without an allocation. They may be any GPUs on which nothing is booked.
    pub(crate) unnamed_whole: BTreeMap<WholeKind, u64>,
    pub(crate) cpu_milli: u64,
    pub(crate) memory_bytes: u64,
    pub(crate) pods: u64,
    pub(crate) anomalies: AnomalyCounts,
}

/// How many of a node's pods that have not ended have each kind of [`crate::Anomaly`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct AnomalyCounts {
    pub(crate) unknown_gpu: u64,
    pub(crate) unreadable: u64,
    pub(crate) not_allocated: u64,
}

impl TakenUsage {
    /// Return the sums of a node without pods.
    pub(crate) fn none(state: Option<&NodeState>) -> TakenUsage {
        TakenUsage {
            gpus: vec![MiB::ZERO; state.map_or(0, |state| state.gpus.len())].into(),
            ..TakenUsage::default()
        }
    }

    /// Add what a pod requests besides GPUs.
    pub(crate) fn add_pod(&mut self, pod: &Pod) {
        self.pods = self.pods.saturating_add(1);
        self.cpu_milli = self.cpu_milli.saturating_add(u64::from(pod.cpu_milli));
        self.memory_bytes = self.memory_bytes.saturating_add(pod.memory_bytes);
    }

    /// Add what a bound pod holds, and return the number of its GPUs that the node does not have.
    pub(crate) fn book_pod(&mut self, pod: &Pod, state: Option<&NodeState>, unit: MemoryUnit) -> u64 {
        let Some(state) = state else { return 0 };
        let parts = parts::of_pod(pod, state, unit);
        self.add_unnamed(parts::unnamed(pod, state, &parts));
        self.book_parts(parts, &pod.held, state)
    }

    /// Add an allocation.
    pub(crate) fn book(&mut self, held: &Held, state: Option<&NodeState>, unit: MemoryUnit) {
        if let Some(state) = state {
            self.book_parts(parts::of_held(held, state, unit), held, state);
        }
    }

    /// Add the parts of an allocation, and return the number of GPUs that the node does not have.
    fn book_parts(&mut self, parts: Vec<HeldShare>, held: &Held, state: &NodeState) -> u64 {
        let mut unknown = 0;
        for part in parts {
            if let Some(position) = part.position.filter(|_| part.cores > 0) {
                if self.cores.is_empty() {
                    self.cores = vec![0; self.gpus.len()].into();
                }
                if let Some(used) = self.cores.get_mut(position) {
                    *used = used.saturating_add(part.cores);
                }
            }
            if let Some(used) = part.position.and_then(|position| self.gpus.get_mut(position)) {
                *used = used.saturating_add(part.memory);
                continue;
            }
            unknown += 1;
            if part.is_anywhere(held, state) {
                self.anywhere = self.anywhere.saturating_add(part.memory);
            }
        }
        unknown
    }

    /// Add whole GPUs that a pod holds without an allocation.
    fn add_unnamed(&mut self, unnamed: Option<(WholeKind, u64)>) {
        if let Some((kind, gpus)) = unnamed {
            let sum = self.unnamed_whole.entry(kind).or_default();
            *sum = sum.saturating_add(gpus);
        }
    }
}

impl AnomalyCounts {
    /// Count the anomalies of a bound pod. `unknown_gpus` is the number of its GPUs that the node does not have.
    pub(crate) fn add(&mut self, pod: &Pod, unknown_gpus: u64) {
        self.unknown_gpu = self.unknown_gpu.saturating_add(unknown_gpus);
        match &pod.held {
            Held::Unreadable(_) => self.unreadable = self.unreadable.saturating_add(1),
            Held::Nothing if pod.request.wants_memory() => self.not_allocated = self.not_allocated.saturating_add(1),
            Held::Nothing | Held::Allocation(_) | Held::Legacy(_) => {}
        }
    }
}
