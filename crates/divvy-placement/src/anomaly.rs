use std::fmt;

use divvy_model::{Error, Held, MiB, PodKey};

use crate::ledger::Ledger;
use crate::parts;

/// A contradiction in the ledger. The ledger repairs no anomaly; the extender counts and shows each one. No anomaly makes the
/// ledger count more memory as taken than it should.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Anomaly {
    /// The pods on a GPU are allocated more memory than the GPU offers.
    Overcommitted {
        /// The node's name.
        node: String,
        /// The GPU's NVML index.
        index: u32,
        /// The memory that the GPU offers, minus the memory that containers of departed pods hold.
        capacity: MiB,
        /// The memory that is allocated on the GPU.
        used: MiB,
    },
    /// A pod that has not ended holds memory of a GPU that its node does not list. The GPU was replaced, or another program wrote
    /// the annotation.
    UnknownGpu {
        pod: PodKey,
        /// The name of the pod's node.
        node: String,
        /// The GPU as the annotation names it: a UUID or an index.
        gpu: String,
        /// The memory that the annotation says the pod holds there.
        memory: MiB,
    },
    /// The annotations of a pod that has not ended cannot be read. The pod holds nothing, and its containers will not be started.
    Unreadable {
        pod: PodKey,
        /// The name of the pod's node.
        node: String,
        /// Why the annotations cannot be read.
        error: Error,
    },
    /// A pod that has not ended requests GPU memory, but it was bound without the extender, so nothing is counted for it.
    NotAllocated {
        pod: PodKey,
        /// The name of the pod's node.
        node: String,
        /// The number of units that the pod requests.
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
                "GPU {index} of node {node} offers {capacity}, but {used} are allocated; Divvy places nothing more there until pods end"
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
                "pod {pod} asks for {units} units of GPU memory but was bound to node {node} without the extender, so no GPU was allocated; \
                 check that kube-scheduler's configuration names the extender, then delete the pod"
            ),
        }
    }
}

impl Ledger {
    /// List all anomalies, ordered by node name, then GPU, then pod UID.
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
                        parts::of_held(held, state, self.unit())
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
