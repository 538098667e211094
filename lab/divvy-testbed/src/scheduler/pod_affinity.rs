//! The plugin InterPodAffinity: required affinity and anti-affinity between pods, including the anti-affinity of existing pods
//! (`plugins/interpodaffinity`).

use std::collections::{BTreeMap, BTreeSet};

use super::selector::ObjectLabels;
use super::terms::Term;
use super::view::{ClusterView, SchedulerNode, SchedulerPod};

/// The reason for a node without a nearby pod that the new pod's affinity requires.
pub const AFFINITY: &str = "node(s) didn't match pod affinity rules";

/// The reason for a node near a pod that the new pod's anti-affinity excludes.
pub const ANTI_AFFINITY: &str = "node(s) didn't match pod anti-affinity rules";

/// The reason for a node near an existing pod whose anti-affinity excludes the new pod.
pub const EXISTING: &str = "node(s) didn't satisfy existing pods anti-affinity rules";

static NO_LABELS: ObjectLabels = ObjectLabels::new();

/// Report whether a term matches a pod whose namespace has these labels.
fn matches(term: &Term, pod: &SchedulerPod, namespace: &ObjectLabels) -> bool {
    (term.namespaces.contains(&pod.namespace) || term.namespace_selector.matches(namespace)) && term.selector.matches(&pod.labels)
}

/// A term of the pod that is being placed, with the namespaces that its selector matches (`mergeAffinityTermNamespacesIfNotEmpty`). As a
/// consequence, only the empty selector matches an unknown namespace.
#[derive(Debug, Clone)]
struct OwnTerm<'a> {
    term: &'a Term,
    found: BTreeSet<&'a str>,
}

impl<'a> OwnTerm<'a> {
    fn all(terms: &'a [Term], namespaces: &'a BTreeMap<String, ObjectLabels>) -> Vec<OwnTerm<'a>> {
        let found = |term: &Term| {
            let chosen = namespaces
                .iter()
                .filter(|(_, labels)| term.namespace_selector.matches(labels));
            chosen.map(|(name, _)| name.as_str()).collect()
        };
        let own = |term| OwnTerm {
            term,
            found: found(term),
        };
        terms.iter().map(own).collect()
    }

    fn matches(&self, pod: &SchedulerPod) -> bool {
        let everywhere = self.term.namespace_selector.is_everything();
        let namespace =
            everywhere || self.term.namespaces.contains(&pod.namespace) || self.found.contains(pod.namespace.as_str());
        namespace && self.term.selector.matches(&pod.labels)
    }
}

/// The topology keys and values where pods match a term.
type MatchedTopology<'a> = BTreeSet<(&'a str, &'a str)>;

fn add<'a>(found: &mut MatchedTopology<'a>, key: &'a str, node: &'a SchedulerNode) {
    if let Some(value) = node.labels.get(key) {
        found.insert((key, value));
    }
}

/// The topology values with pods that match one pod's affinity or anti-affinity, and with pods whose anti-affinity matches that pod.
#[derive(Debug, Clone)]
pub struct Between<'a> {
    pod: &'a SchedulerPod,
    /// The labels of the pod's namespace.
    namespace: &'a ObjectLabels,
    affinity: Vec<OwnTerm<'a>>,
    anti_affinity: Vec<OwnTerm<'a>>,
    wanted: MatchedTopology<'a>,
    unwanted: MatchedTopology<'a>,
    unwanting: MatchedTopology<'a>,
}

impl<'a> Between<'a> {
    /// Look at the pods of a cluster.
    pub fn new(pod: &'a SchedulerPod, cluster: &ClusterView<'a>) -> Between<'a> {
        let mut between = Between {
            pod,
            namespace: cluster.namespaces.get(&pod.namespace).unwrap_or(&NO_LABELS),
            affinity: OwnTerm::all(&pod.affinity, cluster.namespaces),
            anti_affinity: OwnTerm::all(&pod.anti_affinity, cluster.namespaces),
            wanted: MatchedTopology::new(),
            unwanted: MatchedTopology::new(),
            unwanting: MatchedTopology::new(),
        };
        let alone = pod.affinity.is_empty() && pod.anti_affinity.is_empty();
        for (name, other) in cluster
            .pods
            .iter()
            .filter(|(_, other)| !alone || !other.anti_affinity.is_empty())
        {
            if let Some(node) = cluster.nodes.get(*name) {
                between.take(node, other);
            }
        }
        between
    }

    /// Take a pod on a node into account. Pods that are being deleted count.
    fn take(&mut self, node: &'a SchedulerNode, other: &'a SchedulerPod) {
        for term in &other.anti_affinity {
            if matches(term, self.pod, self.namespace) {
                add(&mut self.unwanting, &term.key, node);
            }
        }
        if all_match(&self.affinity, other) {
            for own in &self.affinity {
                add(&mut self.wanted, &own.term.key, node);
            }
        }
        for own in self.anti_affinity.iter().filter(|own| own.matches(other)) {
            add(&mut self.unwanted, &own.term.key, node);
        }
    }

    /// Return why the pod must not be placed on the node, or `None` if it may.
    pub fn refusal(&self, node: &SchedulerNode) -> Option<&'static str> {
        let here = |found: &MatchedTopology<'_>, key: &str| {
            let value = node.labels.get(key);
            value.is_some_and(|value| found.contains(&(key, value.as_str())))
        };
        if !self.is_near(node, |key| here(&self.wanted, key)) {
            return Some(AFFINITY);
        }
        if self.anti_affinity.iter().any(|own| here(&self.unwanted, &own.term.key)) {
            return Some(ANTI_AFFINITY);
        }
        let kept_away = self
            .unwanting
            .iter()
            .any(|(key, value)| node.labels.get(*key).is_some_and(|have| have == value));
        kept_away.then_some(EXISTING)
    }

    /// Report whether the node is near the pods that the affinity requires (`satisfyPodAffinity`). If no pod matches anywhere,
    /// the pod may be the first of a group that must be together. Then any node with the topology keys will do.
    fn is_near(&self, node: &SchedulerNode, here: impl Fn(&str) -> bool) -> bool {
        let keys = || self.affinity.iter().map(|own| own.term.key.as_str());
        if !keys().all(|key| node.labels.contains_key(key)) {
            return false;
        }
        keys().all(here) || (self.wanted.is_empty() && all_match(&self.affinity, self.pod))
    }
}

/// Report whether a pod matches all terms and there is at least one (`podMatchesAllAffinityTerms`).
fn all_match(terms: &[OwnTerm<'_>], pod: &SchedulerPod) -> bool {
    !terms.is_empty() && terms.iter().all(|own| own.matches(pod))
}

#[cfg(test)]
mod tests;
