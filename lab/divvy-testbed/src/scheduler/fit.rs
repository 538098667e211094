//! The plugin NodeResourcesFit: sums of requests (`plugins/noderesources`), as a filter and as LeastAllocated; and kube-scheduler's message
//! when no node is left (`framework/types.go`: `FitError`).

use std::collections::BTreeMap;

use super::view::{SchedulerNode, SchedulerPod};

/// Return a reason for each resource of which the node has too little, given the requests of the pods on it; none if the pod fits.
pub fn insufficient(pod: &SchedulerPod, node: &SchedulerNode, used: &BTreeMap<String, u64>) -> Vec<String> {
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

/// Return a score from 0 to 100 that says how empty the node would be with the pod, averaged over cpu and memory (LeastAllocated).
pub fn least_allocated(pod: &SchedulerPod, node: &SchedulerNode, used: &BTreeMap<String, u64>) -> i64 {
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

/// Return kube-scheduler's message: how many nodes gave each reason, sorted as text.
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
