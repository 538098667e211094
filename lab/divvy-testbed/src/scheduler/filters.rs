//! The filters of kube-scheduler's default profile, in its order. The first filter that refuses provides the reason
//! (`pkg/scheduler/apis/config/v1/default_plugins.go`, `framework/runtime/framework.go`: `RunFilterPlugins`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};

use super::pod_affinity::Between;
use super::selector::Labels;
use super::spread::Spread;
use super::view::{Cluster, NodeView, PodView, Taken};
use super::{fit, node_affinity, node_ports, taints};

/// A filter, with its name in the profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Plugin {
    /// `spec.unschedulable`
    NodeUnschedulable,
    /// Checks taints.
    TaintToleration,
    /// Checks `nodeSelector` and node affinity.
    NodeAffinity,
    /// Checks host ports.
    NodePorts,
    /// Checks sums of requests.
    NodeResourcesFit,
    /// Checks topology spread constraints.
    PodTopologySpread,
    /// Checks affinity between pods.
    InterPodAffinity,
}

impl Plugin {
    /// Report whether the filter's result depends on the labels of pods on nodes.
    pub fn minds_other_pods(self) -> bool {
        matches!(self, Plugin::PodTopologySpread | Plugin::InterPodAffinity)
    }
}

/// The reason why a pod does not fit on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The filter that refused.
    pub by: Plugin,
    /// kube-scheduler's texts. Only NodeResourcesFit returns several.
    pub reasons: Vec<String>,
}

impl Refusal {
    fn new(by: Plugin, reason: &str) -> Refusal {
        let reasons = vec![reason.to_owned()];
        Refusal { by, reasons }
    }
}

/// A pod in a cluster: the state that the filters compute before they check single nodes (`CycleState` after PreFilter).
#[derive(Debug, Clone)]
pub struct Cycle<'a> {
    pod: &'a PodView,
    spread: Spread<'a>,
    between: Between<'a>,
}

impl<'a> Cycle<'a> {
    /// Compute the state from the whole cluster.
    pub fn new(pod: &'a PodView, cluster: &Cluster<'a>) -> Cycle<'a> {
        Cycle {
            pod,
            spread: Spread::new(pod, cluster),
            between: Between::new(pod, cluster),
        }
    }

    /// Return why the pod does not fit on the node, given what is already taken there, or `None` if it fits.
    pub fn refusal(&self, node: &NodeView, taken: &Taken) -> Option<Refusal> {
        self.closed(node)
            .or_else(|| self.elsewhere(node))
            .or_else(|| self.full(node, taken))
            .or_else(|| self.crowded(node))
    }

    fn closed(&self, node: &NodeView) -> Option<Refusal> {
        let tolerations = &self.pod.tolerations;
        if node.unschedulable && !taints::tolerated(&taints::CORDONED, tolerations) {
            return Some(Refusal::new(Plugin::NodeUnschedulable, taints::UNSCHEDULABLE));
        }
        let refused = !taints::all_tolerated(node.every_taint(), tolerations);
        refused.then(|| Refusal::new(Plugin::TaintToleration, taints::UNTOLERATED))
    }

    fn elsewhere(&self, node: &NodeView) -> Option<Refusal> {
        let refused = !self.pod.selects(&node.labels);
        refused.then(|| Refusal::new(Plugin::NodeAffinity, node_affinity::MISMATCH))
    }

    fn full(&self, node: &NodeView, taken: &Taken) -> Option<Refusal> {
        if node_ports::clash(&self.pod.ports, &taken.ports) {
            return Some(Refusal::new(Plugin::NodePorts, node_ports::TAKEN));
        }
        let reasons = fit::insufficient(self.pod, node, &taken.requests);
        let by = Plugin::NodeResourcesFit;
        (!reasons.is_empty()).then_some(Refusal { by, reasons })
    }

    fn crowded(&self, node: &NodeView) -> Option<Refusal> {
        let spread = self.spread.refusal(node);
        let spread = spread.map(|reason| Refusal::new(Plugin::PodTopologySpread, reason));
        spread.or_else(|| Some(Refusal::new(Plugin::InterPodAffinity, self.between.refusal(node)?)))
    }
}

/// Apply kube-scheduler's filters to a pod: return for each node the reasons of the first filter that refuses it, or none if the pod fits.
/// Extenders, preemption, and the queue (including scheduling gates) are not consulted.
///
/// `bound` contains the pods on nodes. Pods in it that have no `spec.nodeName` or have ended do not count, and neither does the
/// pod itself. A node whose condition Ready is not True has the taint that the node controller would set. A namespace that is not
/// in `namespaces` has no labels. Among the `namespaceSelector`s of `pod`, only an empty one matches such a namespace.
pub fn feasible(pod: &Pod, nodes: &[Node], bound: &[Pod], namespaces: &[Namespace]) -> BTreeMap<String, Vec<String>> {
    let nodes: BTreeMap<String, NodeView> = nodes
        .iter()
        .filter_map(|node| Some((node.metadata.name.clone()?, NodeView::of(node))))
        .collect();
    let placed = bound.iter().filter(|other| !is_same(pod, other) && !has_ended(other));
    let placed: Vec<(String, PodView)> = placed
        .filter_map(|other| Some((node_of(other)?, PodView::of(other))))
        .collect();
    let namespaces = namespaces
        .iter()
        .filter_map(|namespace| Some((namespace.metadata.name.clone()?, labels_of(namespace))));
    let namespaces: BTreeMap<String, Labels> = namespaces.collect();
    let cluster = Cluster {
        nodes: &nodes,
        pods: placed.iter().map(|(node, pod)| (node.as_str(), pod)).collect(),
        namespaces: &namespaces,
    };
    let pod = PodView::of(pod);
    let (cycle, taken, none) = (Cycle::new(&pod, &cluster), cluster.taken(), Taken::default());
    let look = |(name, node): (&String, &NodeView)| {
        let refusal = cycle.refusal(node, taken.get(name).unwrap_or(&none));
        (name.clone(), refusal.map(|refusal| refusal.reasons).unwrap_or_default())
    };
    nodes.iter().map(look).collect()
}

/// Return `spec.nodeName` if it is set.
pub(super) fn node_of(pod: &Pod) -> Option<String> {
    let node = pod.spec.as_ref()?.node_name.clone()?;
    (!node.is_empty()).then_some(node)
}

/// Report whether all containers have ended for good. kube-scheduler ignores such pods.
pub(super) fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

pub(super) fn labels_of(namespace: &Namespace) -> Labels {
    namespace.metadata.labels.clone().unwrap_or_default()
}

fn is_same(one: &Pod, other: &Pod) -> bool {
    one.metadata.uid.is_some() && one.metadata.uid == other.metadata.uid
}

#[cfg(test)]
mod tests;
