//! Short notation for clusters in tests: nodes and pods in a few words, and checks of the result of [`feasible`].

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use serde_json::{Value, json};

use super::feasible;

/// A cluster under construction. Its pods are in the namespace `default` unless they set another one.
#[derive(Debug, Default)]
pub(super) struct ClusterBuilder {
    pub(super) nodes: Vec<Node>,
    pub(super) bound: Vec<Pod>,
    pub(super) namespaces: Vec<Namespace>,
}

/// Parse labels from text such as `app=web,tier`. A label without a value is empty.
pub(super) fn labels(text: &str) -> BTreeMap<String, String> {
    let pairs = text.split(',').filter(|pair| !pair.is_empty());
    let pairs = pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")));
    pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect()
}

/// Return a pod with labels and further fields of its spec.
pub(super) fn pod(name: &str, of: &str, spec: Value) -> Pod {
    let mut whole = json!({"containers": [{"name": "c", "image": "i"}]});
    for (field, value) in spec.as_object().into_iter().flatten() {
        whole[field] = value.clone();
    }
    let metadata = json!({"name": name, "namespace": "default", "uid": name, "labels": labels(of)});
    serde_json::from_value(json!({"metadata": metadata, "spec": whole})).expect("a pod")
}

impl ClusterBuilder {
    /// Add a ready node.
    pub(super) fn node(mut self, name: &str, of: &str) -> ClusterBuilder {
        let status = json!({"allocatable": {"pods": "110"}, "conditions": [{"type": "Ready", "status": "True"}]});
        let node = json!({"metadata": {"name": name, "labels": labels(of)}, "status": status});
        self.nodes.push(serde_json::from_value(node).expect("a node"));
        self
    }

    /// Change the node that was added last.
    pub(super) fn with(mut self, change: impl FnOnce(&mut Node)) -> ClusterBuilder {
        change(self.nodes.last_mut().expect("a node"));
        self
    }

    /// Add a pod with labels on a node.
    pub(super) fn has(self, node: &str, of: &str) -> ClusterBuilder {
        self.holds(node, pod("", of, json!({})))
    }

    /// Add a pod on a node. Its name is generated.
    pub(super) fn holds(mut self, node: &str, mut pod: Pod) -> ClusterBuilder {
        let name = format!("bound-{}", self.bound.len());
        (pod.metadata.name, pod.metadata.uid) = (Some(name.clone()), Some(name));
        pod.spec.as_mut().expect("a spec").node_name = Some(node.to_owned());
        self.bound.push(pod);
        self
    }

    /// Add a namespace.
    pub(super) fn namespace(mut self, name: &str, of: &str) -> ClusterBuilder {
        let namespace = json!({"metadata": {"name": name, "labels": labels(of)}});
        self.namespaces.push(serde_json::from_value(namespace).expect("a namespace"));
        self
    }

    /// Return the reasons why the pod does not fit, by node. The text is empty for a node on which the pod fits.
    pub(super) fn says(&self, pod: &Pod) -> Vec<(String, String)> {
        let said = feasible(pod, &self.nodes, &self.bound, &self.namespaces);
        said.into_iter().map(|(node, reasons)| (node, reasons.join("; "))).collect()
    }

    /// Compare the refusals, in the order of the node names, with the expected ones.
    pub(super) fn check(&self, pod: &Pod, expected: &[&str], case: &str) {
        let said = self.says(pod);
        let reasons: Vec<&str> = said.iter().map(|(_, reason)| reason.as_str()).collect();
        assert_eq!(reasons, expected, "{case}: {said:?}");
    }
}
