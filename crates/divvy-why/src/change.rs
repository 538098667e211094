//! A change that may let a pod start.

use serde::{Deserialize, Serialize};

use divvy_model::MiB;

use crate::{PodController, PodName};

/// A change of the pod or of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Change {
    /// The pod requests this many units in total.
    AskFor {
        /// The number of units of gpu-mem.
        units: u64,
    },
    /// The pod requests this share of the compute time of each of its GPUs.
    AskForCores {
        /// The share in percent.
        cores: u32,
    },
    /// A pod ends with all its containers, and is not replaced.
    PodEnds {
        /// The node that the pod is on.
        node: String,
        /// The pod; `null` if the user may not see its name.
        pod: Option<PodName>,
        /// The pod's UID; empty if the user may not see its name.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        uid: String,
        /// Whether the pod is being deleted already.
        deleting: bool,
        /// The controller that replaces the pod when it is deleted.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        owner: Option<PodController>,
        /// Whether the pod has a higher priority than the waiting pod.
        more_important: bool,
        /// The GPU memory that the pod holds or requests.
        #[serde(rename = "memoryMiB")]
        memory: MiB,
    },
    /// The containers that deleted pods have left on a node end.
    LeftoversEnd {
        /// The node's name.
        node: String,
    },
    /// A cordoned node takes pods again.
    Uncordon {
        /// The node's name.
        node: String,
    },
    /// A label is removed from the pod's nodeSelector.
    DropSelector {
        /// The label's name.
        label: String,
        /// The value that the pod required.
        value: String,
    },
    /// The pod tolerates a taint.
    Tolerate {
        /// The taint's key.
        key: String,
        /// The taint's value; empty if it has none.
        value: String,
        /// `NoSchedule` or `NoExecute`
        effect: String,
    },
    /// A node gets a label that it lacks.
    Label {
        /// The node's name.
        node: String,
        /// The label's name.
        label: String,
        /// The label's value.
        value: String,
    },
    /// The pod requests less of another resource: CPU in thousandths of a core, memory in bytes.
    AskForLess {
        /// The name of the resource.
        resource: String,
        /// The largest amount that the pod may request.
        amount: u64,
    },
}
