use std::borrow::Cow;

use divvy_model::Pod;
use k8s_openapi::api::core::v1::{Affinity, NodeSelector, Toleration, TopologySpreadConstraint};
use serde::{Deserialize, Serialize};

use crate::{HostPort, LabelMap, PodController};

/// What kube-scheduler and Divvy read about the pod in question.
#[derive(Debug, Clone, Default)]
pub struct Wants {
    /// What Divvy reads about the pod.
    pub pod: Pod,
    /// `metadata.labels`
    pub labels: LabelMap,
    /// The pod's controller; `None` if it has none.
    pub owner: Option<PodController>,
    /// The pod's effective requests by Kubernetes' formula, as in [`crate::Tenant::requests`].
    pub requests: Vec<(Cow<'static, str>, u64)>,
    /// The first quantity of gpu-mem that has a suffix, as it was written: `3Gi`.
    pub with_suffix: Option<String>,
    /// The host ports that the pod uses.
    pub ports: Vec<HostPort>,
    /// `spec.nodeSelector`
    pub node_selector: LabelMap,
    /// `spec.affinity`
    pub affinity: Affinity,
    /// `spec.topologySpreadConstraints`
    pub spread: Vec<TopologySpreadConstraint>,
    /// `spec.tolerations`
    pub tolerations: Vec<Toleration>,
    /// Names of `spec.schedulingGates`
    pub gates: Vec<String>,
    /// Whether `spec.preemptionPolicy` is `Never`.
    pub never_preempts: bool,
    /// `spec.schedulerName`
    pub scheduler: String,
    /// The pod's volume claims.
    pub claims: Vec<Claim>,
    /// Whether the pod has ResourceClaims (dynamic resource allocation), which Divvy does not read.
    pub resource_claims: bool,
    /// `status.phase`
    pub phase: String,
    /// What other programs report in the pod's status.
    pub reported: Vec<Reported>,
}

/// A PersistentVolumeClaim of a pod.
#[derive(Debug, Clone)]
pub struct Claim {
    /// The claim's name.
    pub name: String,
    /// The claim's state.
    pub state: ClaimState,
}

/// The state of a volume claim.
#[derive(Debug, Clone)]
pub enum ClaimState {
    /// There is no such claim.
    Missing,
    /// The claim has no volume yet, and gets one before pods are placed (`volumeBindingMode: Immediate`).
    Unbound,
    /// The claim gets a volume when its pod is placed (`WaitForFirstConsumer`).
    BoundLater,
    /// The claim has a volume, which only these nodes can reach; `None` if all nodes can.
    Bound(Option<NodeSelector>),
    /// The claim, its volume, or its class could not be read, for this reason.
    Unseen(String),
}

/// What a program reports in a pod's status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reported {
    /// `kube-scheduler`, `kubelet`, or `container NAME`.
    pub by: String,
    /// The reason in one word, for example `Unschedulable`.
    pub reason: String,
    /// The program's own message.
    pub message: String,
}

impl Wants {
    /// Estimate the size in bytes of what is compared with each node and with other pods: the pod's rules for nodes, labels,
    /// ports, and claims.
    pub fn rules_bytes(&self) -> usize {
        let json = |length: Result<String, serde_json::Error>| length.map_or(usize::MAX, |text| text.len());
        let texts = |labels: &LabelMap| labels.iter().map(|(key, value)| key.len() + value.len() + 1).sum::<usize>();
        [
            json(serde_json::to_string(&(&self.affinity, &self.spread, &self.tolerations))),
            texts(&self.node_selector),
            texts(&self.labels),
            self.ports.len() * 16,
            self.claims.iter().map(|claim| claim.name.len() + 64).sum(),
            self.requests.iter().map(|(resource, _)| resource.len() + 8).sum(),
        ]
        .into_iter()
        .fold(0, usize::saturating_add)
    }

    /// Report whether kube-scheduler or another scheduler has tried to place the pod.
    pub(crate) fn was_looked_at(&self) -> bool {
        self.reported.iter().any(|reported| reported.by == "kube-scheduler")
    }

    /// Report whether the pod's scheduler cannot reach Divvy's extender. kube-scheduler then quotes its HTTP client: `Post
    /// "http://…/filter": dial tcp …`.
    pub(crate) fn extender_is_away(&self) -> bool {
        let of_extender = |text: &str| text.contains("Post \"") && (text.contains("/filter\"") || text.contains("/bind\""));
        self.reported
            .iter()
            .any(|reported| reported.by == "kube-scheduler" && of_extender(&reported.message))
    }

    /// Report whether this pod and `other` get the same answer: they have the same controller and the same request.
    pub fn is_like(&self, other: &Wants) -> bool {
        let owned = self.owner.is_some() && self.owner == other.owner && self.pod.namespace == other.pod.namespace;
        let (a, b) = (&self.pod, &other.pod);
        let state = |pod: &Pod| {
            (
                pod.node.is_some(),
                pod.deleting,
                pod.priority,
                pod.nominated.clone(),
                pod.ended(),
            )
        };
        let inter_pod = |wants: &Wants| {
            let affinity = &wants.affinity;
            affinity.pod_affinity.is_some() || affinity.pod_anti_affinity.is_some() || !wants.spread.is_empty()
        };
        owned
            && a.node.is_none()
            && state(a) == state(b)
            && a.request == b.request
            && a.own_visible == b.own_visible
            && self.requests == other.requests
            && self.with_suffix == other.with_suffix
            && self.ports == other.ports
            && self.node_selector == other.node_selector
            && self.affinity == other.affinity
            && self.spread == other.spread
            && self.tolerations == other.tolerations
            && self.gates == other.gates
            && (self.never_preempts, &self.scheduler) == (other.never_preempts, &other.scheduler)
            && self.claims.is_empty()
            && other.claims.is_empty()
            && self.was_looked_at() == other.was_looked_at()
            && self.extender_is_away() == other.extender_is_away()
            && (!inter_pod(self) || self.labels == other.labels)
    }
}
