use std::collections::BTreeMap;

use divvy_model::{Held, legacy, names};
use divvy_placement::{NodeGpus as _, NodeState};
use serde_json::{Value, json};

/// The only write of a bind: `POST pods/NAME/binding`. The API server sets `spec.nodeName` and merges the annotations in one transaction,
/// and refuses a pod with another UID (`BindingREST.Create` in Kubernetes' `pkg/registry/core/pod/storage/storage.go`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingRequest {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod's name.
    pub name: String,
    /// The pod's UID, as a precondition.
    pub uid: String,
    /// The node's name.
    pub node: String,
    /// Divvy's annotation, and gpushare's: five, or six if the pod gets several GPUs. A pod with whole GPUs gets
    /// only Divvy's annotation. A pod without GPUs gets none.
    pub annotations: BTreeMap<String, String>,
}

impl BindingRequest {
    /// Return the Binding object to send.
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

/// Return the annotations for a pod that holds `held` on this node; `None` if the node does not have these GPUs.
///
/// gpushare does not know whole GPUs, so a pod that holds whole GPUs gets only Divvy's annotation.
///
/// Divvy's annotation names GPUs by UUID. If a node's GPUs are known only from gpushare's capacities, they have no UUIDs, so a
/// pod gets only gpushare's annotations. gpushare's five annotations can name only one GPU, the first. gpushare 2.0's annotation,
/// which `kubectl inspect gpushare` reads, names all GPUs.
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
    let is_whole = matches!(held, Held::Allocation(allocation) if allocation.gpus.iter().any(|share| share.whole));
    if is_whole {
        return ours.map(|ours| BTreeMap::from([ours]));
    }
    let mut all = legacy::bind_annotations(first.index, first.units, pod_units, unix_ns);
    if gpus.len() > 1 {
        let each = pod_units / gpus.len() as u64;
        let units = gpus.iter().map(|gpu| (gpu.index, each)).collect();
        all.insert(names::GPUSHARE_ALLOCATION.to_owned(), legacy::allocation_text(&units));
    }
    all.extend(ours);
    Some(all)
}
