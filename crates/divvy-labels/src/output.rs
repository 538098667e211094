//! The forms in which labels are published.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use crate::Labels;

/// Return the text of a feature file for Node Feature Discovery: a line `KEY=VALUE` for each label, sorted by key.
pub fn file(labels: &Labels) -> String {
    labels.labels.iter().map(|(key, value)| format!("{key}={value}\n")).collect()
}

/// The node that a NodeFeature object describes, and the object's metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeFeature {
    /// The node's name.
    pub node: String,
    /// The object's namespace.
    pub namespace: String,
    /// The owners of the object, as in `metadata.ownerReferences`. The object is deleted with them.
    pub owners: Vec<Value>,
}

/// Return a NodeFeature object with these labels (kubernetes-sigs/node-feature-discovery, api/nfd/v1alpha1).
pub fn node_feature(labels: &Labels, of: &NodeFeature) -> Value {
    json!({
        "apiVersion": "nfd.k8s-sigs.io/v1alpha1",
        "kind": "NodeFeature",
        "metadata": {
            "name": format!("nvidia-features-for-{}", of.node),
            "namespace": of.namespace,
            "labels": {"nfd.node.kubernetes.io/node-name": of.node},
            "ownerReferences": of.owners,
        },
        "spec": {
            "features": {"flags": {}, "attributes": {}, "instances": {}},
            "labels": labels.labels,
        },
    })
}

/// The field manager of labels that are written to a node. Labels that it no longer applies disappear from the node.
pub const MANAGER: &str = "divvy-labels";

/// Return the body of a server-side apply that gives these labels to the node with this name and uid. The uid prevents that a node
/// is created.
pub fn node(labels: &BTreeMap<String, String>, name: &str, uid: &str) -> Value {
    json!({"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "uid": uid, "labels": labels}})
}
