use std::fmt;

use divvy_model::{Error, Held, MiB, PodKey};

use crate::Ledger;

/// Something in the ledger that should not be. None of these is repaired here; each takes nothing it should not and is
/// to be counted and shown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Anomaly {
    /// More is allocated on a GPU than it has.
    Overcommitted {
        /// The node.
        node: String,
        /// The GPU's index.
        index: u32,
        /// What it has, without what vanished pods hold.
        capacity: MiB,
        /// What is allocated.
        used: MiB,
    },
    /// A live pod's GPU is not on its node: replaced, or the annotation is of another making.
    UnknownGpu {
        /// The pod.
        pod: PodKey,
        /// Its node.
        node: String,
        /// UUID or index.
        gpu: String,
        /// What it says it holds there.
        memory: MiB,
    },
    /// A live pod's annotations cannot be read. It holds nothing, and its containers will not be started.
    Unreadable {
        /// The pod.
        pod: PodKey,
        /// Its node.
        node: String,
        /// What is wrong.
        error: Error,
    },
    /// A live pod asks for GPU memory and was bound past the extender: nothing is booked for it.
    NotAllocated {
        /// The pod.
        pod: PodKey,
        /// Its node.
        node: String,
        /// Units that it asks for.
        units: u64,
    },
}

impl fmt::Display for Anomaly {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Anomaly::Overcommitted {
                node,
                index,
                capacity,
                used,
            } => write!(
                f,
                "GPU {index} of node {node} has {capacity} to give but {used} are allocated; no more is placed there until pods end"
            ),
            Anomaly::UnknownGpu { pod, node, gpu, memory } => write!(
                f,
                "pod {pod} holds {memory} of GPU {gpu}, which is not among the GPUs that node {node} lists"
            ),
            Anomaly::Unreadable { pod, node, error } => {
                write!(f, "what pod {pod} holds on node {node} cannot be read: {error}")
            }
            Anomaly::NotAllocated { pod, node, units } => write!(
                f,
                "pod {pod} asks for {units} units of GPU memory but was bound to node {node} past the extender, so no GPU was allocated; \
                 check that kube-scheduler's configuration names the extender, then delete the pod"
            ),
        }
    }
}

impl Ledger {
    /// Everything that should not be, in order of node, then GPU, then pod UID.
    pub fn anomalies(&self) -> Vec<Anomaly> {
        let mut found = Vec::new();
        for view in self.nodes() {
            let Some(state) = view.state() else {
                continue;
            };
            let node = view.name().to_owned();
            for (position, gpu) in state.gpus.iter().enumerate() {
                let (capacity, used) = (gpu.capacity.saturating_sub(gpu.held), view.used(position));
                if used > capacity {
                    found.push(Anomaly::Overcommitted {
                        node: node.clone(),
                        index: gpu.index,
                        capacity,
                        used,
                    });
                }
            }
            for pod in view.pods() {
                match &pod.held {
                    Held::Unreadable(error) => found.push(Anomaly::Unreadable {
                        pod: pod.key(),
                        node: node.clone(),
                        error: error.clone(),
                    }),
                    Held::Nothing if pod.request.wants_memory() => found.push(Anomaly::NotAllocated {
                        pod: pod.key(),
                        node: node.clone(),
                        units: pod.request.effective_units().unwrap_or(u64::MAX),
                    }),
                    held => found.extend(
                        self.parts(state, held)
                            .into_iter()
                            .filter(|part| part.position.is_none())
                            .map(|part| Anomaly::UnknownGpu {
                                pod: pod.key(),
                                node: node.clone(),
                                gpu: part.gpu,
                                memory: part.memory,
                            }),
                    ),
                }
            }
        }
        found
    }
}
