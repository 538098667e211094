//! Which nodes a pod fits on, by kube-scheduler's own filters, and what it says when none is left.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{Node, Pod, Taint, Toleration};

use crate::node::plan::{amount, effective_requests};

/// What the filters read of a node.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct NodeView {
    /// Allocatable: cpu in thousandths, else whole units.
    pub allocatable: BTreeMap<String, u64>,
    /// Labels.
    pub labels: BTreeMap<String, String>,
    /// Taints.
    pub taints: Vec<Taint>,
    /// `spec.unschedulable`
    pub unschedulable: bool,
    /// The condition Ready is True.
    pub ready: bool,
    /// Annotations: a change of them wakes pods that an extender refused.
    pub annotations: BTreeMap<String, String>,
}

impl NodeView {
    /// Reads a node.
    pub fn of(node: &Node) -> NodeView {
        let status = node.status.as_ref();
        let spec = node.spec.as_ref();
        let conditions = status.and_then(|status| status.conditions.as_deref()).unwrap_or_default();
        let allocatable = status.and_then(|status| status.allocatable.as_ref());
        NodeView {
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
}

/// What the filters read of a pod.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PodView {
    /// Effective requests, `pods` = 1 among them.
    pub requests: BTreeMap<String, u64>,
    /// `spec.nodeSelector`
    pub node_selector: BTreeMap<String, String>,
    /// `spec.tolerations`
    pub tolerations: Vec<Toleration>,
}

impl PodView {
    /// Reads a pod.
    pub fn of(pod: &Pod) -> PodView {
        let spec = pod.spec.as_ref();
        PodView {
            requests: effective_requests(pod),
            node_selector: spec.and_then(|spec| spec.node_selector.clone()).unwrap_or_default(),
            tolerations: spec.and_then(|spec| spec.tolerations.clone()).unwrap_or_default(),
        }
    }
}

/// Why the pod does not fit on the node, given what pods on it request; empty when it fits. The first filter that
/// refuses is the last one asked; NodeResourcesFit gives all its reasons.
pub fn reasons(pod: &PodView, node: &NodeView, used: &BTreeMap<String, u64>) -> Vec<String> {
    let unschedulable = Taint {
        key: "node.kubernetes.io/unschedulable".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    if node.unschedulable && !tolerated(&unschedulable, &pod.tolerations) {
        return vec!["node(s) were unschedulable".to_owned()];
    }
    // The node controller would have put this taint on it.
    let not_ready = Taint {
        key: "node.kubernetes.io/not-ready".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..Taint::default()
    };
    let taints = node.taints.iter().chain((!node.ready).then_some(&not_ready));
    let matters = |taint: &&Taint| matches!(taint.effect.as_str(), "NoSchedule" | "NoExecute");
    if taints.filter(matters).any(|taint| !tolerated(taint, &pod.tolerations)) {
        return vec!["node(s) had untolerated taint(s)".to_owned()];
    }
    if pod
        .node_selector
        .iter()
        .any(|(key, value)| node.labels.get(key) != Some(value))
    {
        return vec!["node(s) didn't match Pod's node affinity/selector".to_owned()];
    }
    let mut reasons = Vec::new();
    // kube-scheduler names the number of pods first.
    let order = std::iter::once("pods").chain(pod.requests.keys().map(String::as_str).filter(|name| *name != "pods"));
    for name in order {
        let requested = pod.requests.get(name).copied().unwrap_or(0);
        let allocatable = node.allocatable.get(name).copied().unwrap_or(0);
        let used = used.get(name).copied().unwrap_or(0);
        if requested > 0 && requested > allocatable.saturating_sub(used) {
            reasons.push(match name {
                "pods" => "Too many pods".to_owned(),
                _ => format!("Insufficient {name}"),
            });
        }
    }
    reasons
}

fn tolerated(taint: &Taint, tolerations: &[Toleration]) -> bool {
    tolerations.iter().any(|toleration| {
        let effect = toleration.effect.as_deref().unwrap_or("");
        let key = toleration.key.as_deref().unwrap_or("");
        let value = match toleration.operator.as_deref() {
            Some("Exists") => true,
            _ => toleration.value.as_deref().unwrap_or("") == taint.value.as_deref().unwrap_or(""),
        };
        let key = key == taint.key || (key.is_empty() && toleration.operator.as_deref() == Some("Exists"));
        (effect.is_empty() || effect == taint.effect) && key && value
    })
}

/// 0 to 100: how empty the node would be with the pod on it, averaged over cpu and memory (LeastAllocated).
pub fn least_allocated(pod: &PodView, node: &NodeView, used: &BTreeMap<String, u64>) -> i64 {
    let scores = ["cpu", "memory"].map(|name| {
        let of = |map: &BTreeMap<String, u64>| u128::from(map.get(name).copied().unwrap_or(0));
        let (allocatable, taken) = (of(&node.allocatable), of(used) + of(&pod.requests));
        match allocatable {
            0 => 0,
            _ => i64::try_from(allocatable.saturating_sub(taken) * 100 / allocatable).unwrap_or(0),
        }
    });
    (scores[0] + scores[1]) / 2
}

/// kube-scheduler's sentence: how often each reason was given, sorted as texts.
pub fn refusal(nodes: usize, reasons: impl IntoIterator<Item = String>) -> String {
    if nodes == 0 {
        return "no nodes available to schedule pods".to_owned();
    }
    let mut counts: BTreeMap<String, usize> = BTreeMap::new();
    for reason in reasons {
        *counts.entry(reason).or_default() += 1;
    }
    let mut parts: Vec<String> = counts.iter().map(|(reason, count)| format!("{count} {reason}")).collect();
    parts.sort();
    if parts.is_empty() {
        return format!("0/{nodes} nodes are available.");
    }
    format!("0/{nodes} nodes are available: {}.", parts.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(of: &[(&str, u64)]) -> BTreeMap<String, u64> {
        of.iter().map(|(name, amount)| ((*name).to_owned(), *amount)).collect()
    }

    #[test]
    fn a_pod_fits_where_the_sums_allow_it() {
        let node = NodeView {
            allocatable: map(&[("cpu", 4000), ("pods", 2), ("aliyun.com/gpu-mem", 16)]),
            ready: true,
            ..NodeView::default()
        };
        let pod = |mem: u64| PodView {
            requests: map(&[("pods", 1), ("aliyun.com/gpu-mem", mem)]),
            ..PodView::default()
        };
        for (mem, used, expected) in [
            (16, map(&[]), vec![]),
            (4, map(&[("aliyun.com/gpu-mem", 12)]), vec![]),
            (5, map(&[("aliyun.com/gpu-mem", 12)]), vec!["Insufficient aliyun.com/gpu-mem"]),
            (
                17,
                map(&[("pods", 2)]),
                vec!["Too many pods", "Insufficient aliyun.com/gpu-mem"],
            ),
        ] {
            assert_eq!(reasons(&pod(mem), &node, &used), expected);
        }
        let closed = NodeView {
            unschedulable: true,
            ..node.clone()
        };
        assert_eq!(reasons(&pod(1), &closed, &map(&[])), ["node(s) were unschedulable"]);
        let lost = NodeView {
            ready: false,
            ..node.clone()
        };
        assert_eq!(reasons(&pod(1), &lost, &map(&[])), ["node(s) had untolerated taint(s)"]);
        let picky = PodView {
            node_selector: BTreeMap::from([("disk".to_owned(), "ssd".to_owned())]),
            ..pod(1)
        };
        assert_eq!(
            reasons(&picky, &node, &map(&[])),
            ["node(s) didn't match Pod's node affinity/selector"]
        );
    }

    #[test]
    fn the_refusal_reads_as_kube_schedulers() {
        let reasons = [
            "Insufficient aliyun.com/gpu-mem",
            "Insufficient GPU Memory in one device",
            "Insufficient aliyun.com/gpu-mem",
        ];
        assert_eq!(
            refusal(3, reasons.map(str::to_owned)),
            "0/3 nodes are available: 1 Insufficient GPU Memory in one device, 2 Insufficient aliyun.com/gpu-mem."
        );
        assert_eq!(refusal(0, []), "no nodes available to schedule pods");
    }
}
