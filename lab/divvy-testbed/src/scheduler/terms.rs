//! What a pod says about its place among other pods, as read from its spec: the terms of its affinity, and its topology spread constraints.

use std::collections::BTreeSet;

use k8s_openapi::api::core::v1::{PodAffinityTerm, TopologySpreadConstraint};

use super::selector::{ObjectLabels, Selector};

/// A required term of a pod's affinity or anti-affinity (`framework/types.go`: `AffinityTerm`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Term {
    pub(super) namespaces: BTreeSet<String>,
    pub(super) namespace_selector: Selector,
    pub(super) selector: Selector,
    pub(super) key: String,
}

impl Term {
    /// Parse a term of a pod with this namespace and these labels. Without `namespaces` and `namespaceSelector`, the term is about the pod's
    /// own namespace.
    pub fn of(term: &PodAffinityTerm, namespace: &str, labels: &ObjectLabels) -> Term {
        let named = term.namespaces.iter().flatten().cloned().collect::<BTreeSet<_>>();
        let own = named.is_empty() && term.namespace_selector.is_none();
        Term {
            namespaces: if own { BTreeSet::from([namespace.to_owned()]) } else { named },
            namespace_selector: Selector::of(term.namespace_selector.as_ref()),
            selector: Selector::of(term.label_selector.as_ref())
                .with_keys("In", term.match_label_keys.as_ref(), labels)
                .with_keys("NotIn", term.mismatch_label_keys.as_ref(), labels),
            key: term.topology_key.clone(),
        }
    }
}

/// A topology spread constraint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Constraint {
    pub(super) max_skew: i64,
    pub(super) key: String,
    pub(super) selector: Selector,
    pub(super) min_domains: i64,
    pub(super) honor_affinity: bool,
    pub(super) honor_taints: bool,
}

impl Constraint {
    /// Parse a constraint of a pod with these labels. Return `None` if it does not restrict the pod's placement.
    pub fn of(constraint: &TopologySpreadConstraint, labels: &ObjectLabels) -> Option<Constraint> {
        let selector = Selector::of(constraint.label_selector.as_ref());
        (constraint.when_unsatisfiable == "DoNotSchedule").then(|| Constraint {
            max_skew: i64::from(constraint.max_skew),
            key: constraint.topology_key.clone(),
            selector: selector.with_keys("In", constraint.match_label_keys.as_ref(), labels),
            min_domains: constraint.min_domains.map_or(1, i64::from),
            honor_affinity: constraint.node_affinity_policy.as_deref().unwrap_or("Honor") == "Honor",
            honor_taints: constraint.node_taints_policy.as_deref().unwrap_or("Ignore") == "Honor",
        })
    }
}
