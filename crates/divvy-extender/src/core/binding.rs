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
    /// Divvy's annotation and gpushare's five, and a sixth for several GPUs; none for a pod without GPU memory.
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
/// GPUs by UUID, so a node that is known only by gpushare's capacities gets gpushare's annotations alone. Of several GPUs those can name the first one
/// only; all are in the one that gpushare's later version has for that, which `kubectl inspect gpushare` reads.
pub(super) fn annotations(held: &Held, node: &NodeState, pod_units: u64, unix_ns: u64) -> Option<BTreeMap<String, String>> {
    let (positions, ours): (Option<Vec<usize>>, _) = match held {
        Held::Allocation(allocation) => (
            allocation.gpus.iter().map(|share| node.by_uuid(&share.uuid)).collect(),
            Some((names::ALLOCATION.to_owned(), allocation.to_json())),
        ),
        Held::Legacy(legacy) => (legacy.gpus.keys().map(|index| node.by_index(*index)).collect(), None),
        Held::Nothing | Held::Unreadable(_) => return None,
    };
    let gpus: Option<Vec<_>> = positions?.into_iter().map(|position| node.gpus.get(position)).collect();
    let gpus = gpus?;
    let first = gpus.first()?;
    let mut all = legacy::bind_annotations(first.index, first.units, pod_units, unix_ns);
    if gpus.len() > 1 {
        let each = pod_units / gpus.len() as u64;
        let units = gpus.iter().map(|gpu| (gpu.index, each)).collect();
        all.insert(names::GPUSHARE_ALLOCATION.to_owned(), legacy::allocation_text(&units));
    }
    all.extend(ours);
    Some(all)
}
