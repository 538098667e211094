use std::collections::BTreeMap;

use divvy_model::{Held, legacy, names};
use divvy_placement::NodeState;
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
    /// Divvy's annotation and gpushare's five, plus a sixth of gpushare for several GPUs. Only Divvy's for whole GPUs, none for a pod without GPUs.
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
/// gpushare knows no whole GPUs, so a pod that has some gets only Divvy's annotation.
///
/// Divvy's annotation names GPUs by UUID, so on a node whose GPUs are known only from gpushare's capacities, a pod gets only
/// gpushare's annotations. gpushare's five annotations can name one GPU, the first. All GPUs are in the annotation of gpushare 2.0,
/// which `kubectl inspect gpushare` reads.
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
    if gpus.iter().any(|gpu| gpu.whole) {
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
