//! The parts of nodes, pods, and the cluster that the filters read.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Affinity, Node, Pod, PodAffinityTerm, Taint, Toleration};

use super::node_affinity::NodeAffinity;
use super::node_ports::{UsedHostPort, host_ports};
use super::selector::ObjectLabels;
use super::taints;
use super::terms::{Constraint, Term};
use crate::node::plan::{amount, effective_requests};

/// A node as the filters see it.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SchedulerNode {
    /// The allocatable resources: cpu in thousandths, others in whole units.
    pub allocatable: BTreeMap<String, u64>,
    pub labels: ObjectLabels,
    pub taints: Vec<Taint>,
    /// `spec.unschedulable`
    pub unschedulable: bool,
    /// Whether the condition Ready is True.
    pub ready: bool,
    /// The annotations. A change of them wakes pods that an extender refused.
    pub annotations: BTreeMap<String, String>,
}

impl SchedulerNode {
    /// Read a node.
    pub fn of(node: &Node) -> SchedulerNode {
        let status = node.status.as_ref();
        let spec = node.spec.as_ref();
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let allocatable = status.and_then(|status| status.allocatable.as_ref());
        SchedulerNode {
            allocatable: allocatable
                .into_iter()
                .flatten()
                .map(|(name, q)| (name.clone(), amount(name, &q.0)))
                .collect(),
            labels: node.metadata.labels.clone().unwrap_or_default(),
            taints: spec.and_then(|spec| spec.taints.clone()).unwrap_or_default(),
            unschedulable: spec.and_then(|spec| spec.unschedulable).unwrap_or(false),
            ready: conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            annotations: node.metadata.annotations.clone().unwrap_or_default(),
        }
    }

    /// Return the node's taints, including those that the node controller would set.
    pub fn every_taint(&self) -> impl Iterator<Item = &Taint> {
        let cordoned = self.unschedulable.then_some(&*taints::CORDONED);
        let not_ready = (!self.ready).then_some(&*taints::NOT_READY);
        self.taints.iter().chain(cordoned).chain(not_ready)
    }
}

/// A pod as the filters see it: the pod that is being placed, or a pod on a node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SchedulerPod {
    /// `metadata.namespace`
    pub namespace: String,
    pub labels: ObjectLabels,
    /// Whether the pod is being deleted.
    pub terminating: bool,
    /// The effective requests, including `pods` = 1.
    pub requests: BTreeMap<String, u64>,
    /// `spec.nodeSelector`
    pub node_selector: ObjectLabels,
    /// The required node affinity.
    pub node_affinity: Option<NodeAffinity>,
    /// `spec.tolerations`
    pub tolerations: Vec<Toleration>,
    /// The host ports.
    pub ports: Vec<UsedHostPort>,
    /// The topology spread constraints that restrict the pod's placement.
    pub spread: Vec<Constraint>,
    /// The required terms of the pod affinity.
    pub affinity: Vec<Term>,
    /// The required terms of the pod anti-affinity.
    pub anti_affinity: Vec<Term>,
}

impl SchedulerPod {
    /// Read a pod.
    pub fn of(pod: &Pod) -> SchedulerPod {
        let meta = &pod.metadata;
        let mut view = SchedulerPod {
            namespace: meta.namespace.clone().unwrap_or_else(|| "default".to_owned()),
            labels: meta.labels.clone().unwrap_or_default(),
            terminating: meta.deletion_timestamp.is_some(),
            requests: effective_requests(pod),
            ports: host_ports(pod),
            ..SchedulerPod::default()
        };
        let Some(spec) = &pod.spec else {
            return view;
        };
        view.node_selector = spec.node_selector.clone().unwrap_or_default();
        view.tolerations = spec.tolerations.clone().unwrap_or_default();
        let constraints = spec.topology_spread_constraints.iter().flatten();
        view.spread = constraints
            .filter_map(|constraint| Constraint::of(constraint, &view.labels))
            .collect();
        if let Some(affinity) = &spec.affinity {
            view.read_affinity(affinity);
        }
        view
    }

    fn read_affinity(&mut self, affinity: &Affinity) {
        let nodes = affinity.node_affinity.as_ref();
        let nodes = nodes.and_then(|nodes| nodes.required_during_scheduling_ignored_during_execution.as_ref());
        self.node_affinity = nodes.map(NodeAffinity::of);
        let near = affinity.pod_affinity.as_ref();
        let near = near.and_then(|near| near.required_during_scheduling_ignored_during_execution.as_ref());
        let away = affinity.pod_anti_affinity.as_ref();
        let away = away.and_then(|away| away.required_during_scheduling_ignored_during_execution.as_ref());
        let read = |terms: Option<&Vec<PodAffinityTerm>>| {
            let terms = terms.into_iter().flatten();
            terms.map(|term| Term::of(term, &self.namespace, &self.labels)).collect()
        };
        (self.affinity, self.anti_affinity) = (read(near), read(away));
    }

    /// Report whether `nodeSelector` and required node affinity allow a node with these labels.
    pub fn selects(&self, labels: &ObjectLabels) -> bool {
        let equal = |(key, value): (&String, &String)| labels.get(key) == Some(value);
        self.node_selector.iter().all(equal) && self.node_affinity.as_ref().is_none_or(|affinity| affinity.matches(labels))
    }
}

/// The resources and ports that pods on one node have taken.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Taken {
    /// The sums of requests.
    pub requests: BTreeMap<String, u64>,
    /// The host ports.
    pub ports: Vec<UsedHostPort>,
}

impl Taken {
    /// Add a pod's requests and ports.
    pub fn add(&mut self, pod: &SchedulerPod) {
        for (resource, amount) in &pod.requests {
            let sum = self.requests.entry(resource.clone()).or_default();
            *sum = sum.saturating_add(*amount);
        }
        self.ports.extend(pod.ports.iter().cloned());
    }

    /// Return what these pods take together.
    pub fn by<'a>(pods: impl IntoIterator<Item = &'a SchedulerPod>) -> Taken {
        let mut taken = Taken::default();
        for pod in pods {
            taken.add(pod);
        }
        taken
    }
}

/// The cluster at the time when a pod is scheduled.
#[derive(Debug, Clone)]
pub struct ClusterView<'a> {
    /// The nodes by name.
    pub nodes: &'a BTreeMap<String, SchedulerNode>,
    /// The pods on nodes and on their way to them, each with the node's name. Pods of unknown nodes do not count.
    pub pods: Vec<(&'a str, &'a SchedulerPod)>,
    /// The labels of namespaces by name.
    pub namespaces: &'a BTreeMap<String, ObjectLabels>,
}

impl ClusterView<'_> {
    /// Return what is taken on each node that has pods.
    pub fn taken(&self) -> BTreeMap<String, Taken> {
        let mut taken: BTreeMap<String, Taken> = BTreeMap::new();
        for (node, pod) in &self.pods {
            taken.entry((*node).to_owned()).or_default().add(pod);
        }
        taken
    }
}
