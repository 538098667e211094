use std::collections::BTreeMap;

use divvy_model::{Held, legacy, names};
use divvy_placement::NodeState;
use serde_json::{Value, json};

/// The one write of a bind: `POST pods/NAME/binding`. The API server merges the annotations with `spec.nodeName` in one
/// transaction and refuses another UID (research/reliability.md section 2.1).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingRequest {
    /// The pod's namespace.
    pub namespace: String,
    /// Its name.
    pub name: String,
    /// Its UID, as a precondition.
    pub uid: String,
    /// The node.
    pub node: String,
    /// Divvy's annotation and gpushare's five; none for a pod without GPU memory.
    pub annotations: BTreeMap<String, String>,
}

impl BindingRequest {
    /// The object to send.
    pub fn to_json(&self) -> Value {
        let mut metadata = json!({"name": self.name, "namespace": self.namespace, "uid": self.uid});
        if !self.annotations.is_empty() {
            metadata["annotations"] = json!(self.annotations);
        }
        json!({
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": metadata,
            "target": {"apiVersion": "v1", "kind": "Node", "name": self.node},
        })
    }
}

/// What is written on a pod that holds this on this node; `None` if the node has no such GPU. Divvy's own annotation names
/// GPUs by UUID, so a node that is known only by gpushare's capacities gets gpushare's annotations alone.
pub(super) fn annotations(held: &Held, node: &NodeState, pod_units: u64, unix_ns: u64) -> Option<BTreeMap<String, String>> {
    let (position, ours) = match held {
        Held::Allocation(allocation) => (
            node.by_uuid(&allocation.gpus.first()?.uuid)?,
            Some((names::ALLOCATION.to_owned(), allocation.to_json())),
        ),
        Held::Legacy(legacy) => (node.by_index(*legacy.gpus.keys().next()?)?, None),
        Held::Nothing | Held::Unreadable(_) => return None,
    };
    let gpu = node.gpus.get(position)?;
    let mut all = legacy::bind_annotations(gpu.index, gpu.units, pod_units, unix_ns);
    all.extend(ours);
    Some(all)
}
