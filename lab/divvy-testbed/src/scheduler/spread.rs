//! The plugin PodTopologySpread: constraints with `whenUnsatisfiable: DoNotSchedule` (`plugins/podtopologyspread`).

use std::collections::BTreeMap;

use super::taints;
use super::terms::Constraint;
use super::view::{ClusterView, SchedulerNode, SchedulerPod};

/// The reason for a node where the pod would exceed the allowed skew.
pub const SKEW: &str = "node(s) didn't match pod topology spread constraints";

/// The reason for a node without the topology key.
pub const NO_LABEL: &str = "node(s) didn't match pod topology spread constraints (missing required label)";

/// Report whether the node's domain counts for the pod (`matchNodeInclusionPolicies`).
fn includes(constraint: &Constraint, pod: &SchedulerPod, node: &SchedulerNode) -> bool {
    (!constraint.honor_affinity || pod.selects(&node.labels))
        && (!constraint.honor_taints || taints::all_tolerated(node.every_taint(), &pod.tolerations))
}

/// The current spread of pods with respect to one pod's constraints.
#[derive(Debug, Clone)]
pub struct SpreadCounts<'a> {
    pod: &'a SchedulerPod,
    /// For each constraint, the number of matching pods by domain.
    domains: Vec<BTreeMap<&'a str, i64>>,
}

impl<'a> SpreadCounts<'a> {
    /// Count the pods of a cluster.
    pub fn new(pod: &'a SchedulerPod, cluster: &ClusterView<'a>) -> SpreadCounts<'a> {
        let mut spread = SpreadCounts {
            pod,
            domains: vec![BTreeMap::new(); pod.spread.len()],
        };
        if pod.spread.is_empty() {
            return spread;
        }
        for node in cluster.nodes.values() {
            for index in spread.counting(node) {
                spread.add(index, node, 0);
            }
        }
        for (name, other) in &cluster.pods {
            if let Some(node) = cluster.nodes.get(*name) {
                spread.count(node, other);
            }
        }
        spread
    }

    /// Count a pod on a node. Pods that are being deleted or in another namespace do not count.
    fn count(&mut self, node: &'a SchedulerNode, other: &SchedulerPod) {
        if other.terminating || other.namespace != self.pod.namespace {
            return;
        }
        for index in self.counting(node) {
            let matches = |constraint: &Constraint| constraint.selector.matches(&other.labels);
            if self.pod.spread.get(index).is_some_and(matches) {
                self.add(index, node, 1);
            }
        }
    }

    /// Return the constraints for which a node counts; none if it lacks the topology key of any of them.
    fn counting(&self, node: &SchedulerNode) -> Vec<usize> {
        let constraints = &self.pod.spread;
        if !constraints.iter().all(|constraint| node.labels.contains_key(&constraint.key)) {
            return Vec::new();
        }
        let included = constraints.iter().map(|constraint| includes(constraint, self.pod, node));
        included
            .enumerate()
            .filter_map(|(index, included)| included.then_some(index))
            .collect()
    }

    fn add(&mut self, index: usize, node: &'a SchedulerNode, by: i64) {
        let domain = self
            .pod
            .spread
            .get(index)
            .and_then(|constraint| node.labels.get(&constraint.key));
        if let (Some(domain), Some(counts)) = (domain, self.domains.get_mut(index)) {
            *counts.entry(domain).or_default() += by;
        }
    }

    /// Return why the pod must not be placed on the node, or `None` if it may.
    pub fn refusal(&self, node: &SchedulerNode) -> Option<&'static str> {
        self.pod.spread.iter().zip(&self.domains).find_map(|(constraint, counts)| {
            let Some(domain) = node.labels.get(&constraint.key) else {
                return Some(NO_LABEL);
            };
            let least = counts.values().min().copied().unwrap_or(0);
            let enough = i64::try_from(counts.len()).unwrap_or(i64::MAX) >= constraint.min_domains;
            let least = if enough { least } else { 0 };
            let here = counts.get(domain.as_str()).copied().unwrap_or(0);
            let own = i64::from(constraint.selector.matches(&self.pod.labels));
            (here + own - least > constraint.max_skew).then_some(SKEW)
        })
    }
}

#[cfg(test)]
mod tests;
