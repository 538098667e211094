//! The filters of kube-scheduler's default profile, in its order. The first filter that refuses provides the reason
//! (`pkg/scheduler/apis/config/v1/default_plugins.go`, `framework/runtime/framework.go`: `RunFilterPlugins`).

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};

use super::pod_affinity::Between;
use super::selector::ObjectLabels;
use super::spread::SpreadCounts;
use super::view::{ClusterView, SchedulerNode, SchedulerPod, Taken};
use super::{fit, node_affinity, node_ports, taints};

/// A filter, with its name in the profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FilterPlugin {
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

impl FilterPlugin {
    /// Report whether the filter's result depends on the labels of pods on nodes.
    pub fn minds_other_pods(self) -> bool {
        matches!(self, FilterPlugin::PodTopologySpread | FilterPlugin::InterPodAffinity)
    }
}

/// The reason why a pod does not fit on a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FilterRefusal {
    /// The filter that refused.
    pub by: FilterPlugin,
    /// kube-scheduler's texts. Only NodeResourcesFit returns several.
    pub reasons: Vec<String>,
}

impl FilterRefusal {
    fn new(by: FilterPlugin, reason: &str) -> FilterRefusal {
        let reasons = vec![reason.to_owned()];
        FilterRefusal { by, reasons }
    }
}

/// A pod in a cluster: the state that the filters compute before they check single nodes (`CycleState` after PreFilter).
#[derive(Debug, Clone)]
pub struct Cycle<'a> {
    pod: &'a SchedulerPod,
    spread: SpreadCounts<'a>,
    between: Between<'a>,
}

impl<'a> Cycle<'a> {
    /// Compute the state from the whole cluster.
    pub fn new(pod: &'a SchedulerPod, cluster: &ClusterView<'a>) -> Cycle<'a> {
        Cycle {
            pod,
            spread: SpreadCounts::new(pod, cluster),
            between: Between::new(pod, cluster),
        }
    }

    /// Return why the pod does not fit on the node, given what is already taken there, or `None` if it fits.
    pub fn refusal(&self, node: &SchedulerNode, taken: &Taken) -> Option<FilterRefusal> {
        self.closed(node)
            .or_else(|| self.elsewhere(node))
            .or_else(|| self.full(node, taken))
            .or_else(|| self.crowded(node))
    }

    fn closed(&self, node: &SchedulerNode) -> Option<FilterRefusal> {
        let tolerations = &self.pod.tolerations;
        if node.unschedulable && !taints::tolerated(&taints::CORDONED, tolerations) {
            return Some(FilterRefusal::new(FilterPlugin::NodeUnschedulable, taints::UNSCHEDULABLE));
        }
        let refused = !taints::all_tolerated(node.every_taint(), tolerations);
        refused.then(|| FilterRefusal::new(FilterPlugin::TaintToleration, taints::UNTOLERATED))
    }

    fn elsewhere(&self, node: &SchedulerNode) -> Option<FilterRefusal> {
        let refused = !self.pod.selects(&node.labels);
        refused.then(|| FilterRefusal::new(FilterPlugin::NodeAffinity, node_affinity::MISMATCH))
    }

    fn full(&self, node: &SchedulerNode, taken: &Taken) -> Option<FilterRefusal> {
        if node_ports::clash(&self.pod.ports, &taken.ports) {
            return Some(FilterRefusal::new(FilterPlugin::NodePorts, node_ports::TAKEN));
        }
        let reasons = fit::insufficient(self.pod, node, &taken.requests);
        let by = FilterPlugin::NodeResourcesFit;
        (!reasons.is_empty()).then_some(FilterRefusal { by, reasons })
    }

    fn crowded(&self, node: &SchedulerNode) -> Option<FilterRefusal> {
        let spread = self.spread.refusal(node);
        let spread = spread.map(|reason| FilterRefusal::new(FilterPlugin::PodTopologySpread, reason));
        spread.or_else(|| {
            Some(FilterRefusal::new(
                FilterPlugin::InterPodAffinity,
                self.between.refusal(node)?,
            ))
        })
    }
}

/// Apply kube-scheduler's filters to a pod: return for each node the reasons of the first filter that refuses it, or none if the pod fits.
/// Extenders, preemption, and the queue (including scheduling gates) are not consulted.
///
/// `bound` contains the pods on nodes. Pods in it that have no `spec.nodeName` or have ended do not count, and neither does the
/// pod itself. A node whose condition Ready is not True has the taint that the node controller would set. A namespace that is not
/// in `namespaces` has no labels. Among the `namespaceSelector`s of `pod`, only an empty one matches such a namespace.
pub fn feasible(pod: &Pod, nodes: &[Node], bound: &[Pod], namespaces: &[Namespace]) -> BTreeMap<String, Vec<String>> {
    let nodes: BTreeMap<String, SchedulerNode> = nodes
        .iter()
        .filter_map(|node| Some((node.metadata.name.clone()?, SchedulerNode::of(node))))
        .collect();
    let placed = bound.iter().filter(|other| !is_same(pod, other) && !has_ended(other));
    let placed: Vec<(String, SchedulerPod)> = placed
        .filter_map(|other| Some((node_of(other)?, SchedulerPod::of(other))))
        .collect();
    let namespaces = namespaces
        .iter()
        .filter_map(|namespace| Some((namespace.metadata.name.clone()?, labels_of(namespace))));
    let namespaces: BTreeMap<String, ObjectLabels> = namespaces.collect();
    let cluster = ClusterView {
        nodes: &nodes,
        pods: placed.iter().map(|(node, pod)| (node.as_str(), pod)).collect(),
        namespaces: &namespaces,
    };
    let pod = SchedulerPod::of(pod);
    let (cycle, taken, none) = (Cycle::new(&pod, &cluster), cluster.taken(), Taken::default());
    let look = |(name, node): (&String, &SchedulerNode)| {
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

pub(super) fn labels_of(namespace: &Namespace) -> ObjectLabels {
    namespace.metadata.labels.clone().unwrap_or_default()
}

fn is_same(one: &Pod, other: &Pod) -> bool {
    one.metadata.uid.is_some() && one.metadata.uid == other.metadata.uid
}

#[cfg(test)]
mod tests;
