//! How other pods restrict the waiting pod: affinity, anti-affinity, and topology spread, by the rules of kube-scheduler's
//! plugins InterPodAffinity and PodTopologySpread.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{PodAffinityTerm, TopologySpreadConstraint};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, LabelSelectorRequirement};

use crate::evaluate::{SnapshotQuestion, node_matches, tolerates};
use crate::selector::selects;
use crate::{LabelMap, NodeSite, Obstacle};

/// The other pods, as far as they matter to one question.
#[derive(Debug, Default)]
pub(crate) struct Peers {
    /// Topology key and value → a pod in that domain whose anti-affinity keeps the waiting pod away.
    avoided: BTreeMap<(String, String), Option<String>>,
    affinity: Option<Affinity>,
    /// Topology key and value → a pod in that domain that the waiting pod's own anti-affinity avoids.
    avoids: BTreeMap<(String, String), Option<String>>,
    spread: Vec<TopologySpread>,
}

#[derive(Debug)]
struct Affinity {
    keys: Vec<String>,
    /// Topology key and value → the number of pods in that domain that match all terms.
    there: BTreeMap<(String, String), usize>,
    /// Whether the pod matches its own terms. If it does, the first pod of a group may go anywhere.
    itself: bool,
}

#[derive(Debug)]
struct TopologySpread {
    key: String,
    max_skew: i32,
    counts: BTreeMap<String, i64>,
    fewest: i64,
    itself: i64,
}

/// The labels of the namespaces; `None` if they could not be read.
type Namespaces<'a> = Option<&'a BTreeMap<String, LabelMap>>;

impl Peers {
    pub(crate) fn of(question: &SnapshotQuestion<'_>) -> Peers {
        let snapshot = question.snapshot;
        let wants = &*question.wants;
        let own = (wants.pod.namespace.as_str(), &wants.labels);
        let namespaces = snapshot.namespaces.as_ref();
        let mut peers = Peers::default();
        for &position in &snapshot.avoiders {
            let tenant = &snapshot.tenants[position];
            for term in tenant.avoids.iter().filter(|_| question.counts(position)) {
                let matches = term_matches(term, (&tenant.namespace, &tenant.labels), own, namespaces);
                if let Some(place) = question.place(position, &term.topology_key).filter(|_| matches) {
                    peers.avoided.insert(place, question.name(tenant));
                }
            }
        }
        peers.read_affinity(question);
        peers.spread = question
            .wants
            .spread
            .iter()
            .filter(|one| one.when_unsatisfiable == "DoNotSchedule")
            .collect::<Vec<_>>()
            .iter()
            .map(|one| spread(question, one))
            .collect();
        peers
    }

    fn read_affinity(&mut self, question: &SnapshotQuestion<'_>) {
        let (snapshot, wants) = (question.snapshot, &*question.wants);
        let own = (wants.pod.namespace.as_str(), &wants.labels);
        let with = wants.affinity.pod_affinity.as_ref();
        let with = with
            .and_then(|with| with.required_during_scheduling_ignored_during_execution.as_deref())
            .unwrap_or_default();
        let apart = wants.affinity.pod_anti_affinity.as_ref();
        let apart = apart
            .and_then(|apart| apart.required_during_scheduling_ignored_during_execution.as_deref())
            .unwrap_or_default();
        if with.is_empty() && apart.is_empty() {
            return;
        }
        let namespaces = snapshot.namespaces.as_ref();
        let all = |pod: (&str, &LabelMap)| with.iter().all(|term| term_matches(term, own, pod, namespaces));
        let mut there = BTreeMap::new();
        for (position, tenant) in snapshot
            .tenants
            .iter()
            .enumerate()
            .filter(|(position, _)| question.counts(*position))
        {
            let pod = (&*tenant.namespace, &*tenant.labels);
            if !with.is_empty() && all(pod) {
                for place in with.iter().filter_map(|term| question.place(position, &term.topology_key)) {
                    *there.entry(place).or_insert(0) += 1;
                }
            }
            for term in apart.iter().filter(|term| term_matches(term, own, pod, namespaces)) {
                if let Some(place) = question.place(position, &term.topology_key) {
                    self.avoids.insert(place, question.name(tenant));
                }
            }
        }
        self.affinity = (!with.is_empty()).then(|| Affinity {
            keys: with.iter().map(|term| term.topology_key.clone()).collect(),
            there,
            itself: all(own),
        });
    }

    /// Add the obstacles on a node.
    pub(crate) fn obstacles(&self, site: &NodeSite, found: &mut Vec<Obstacle>) {
        let places = || site.labels.iter().map(|(key, value)| (key.clone(), value.clone()));
        if !self.avoided.is_empty()
            && let Some((topology, pod)) = places().find_map(|place| Some((place.0.clone(), self.avoided.get(&place)?.clone())))
        {
            found.push(Obstacle::AvoidedBy { topology, pod });
        }
        if !self.avoids.is_empty()
            && let Some((topology, pod)) = places().find_map(|place| Some((place.0.clone(), self.avoids.get(&place)?.clone())))
        {
            found.push(Obstacle::PodAntiAffinity { topology, pod });
        }
        found.extend(self.affinity.as_ref().and_then(|affinity| affinity.obstacle(site)));
        found.extend(self.spread.iter().find_map(|spread| spread.obstacle(site)));
    }
}

impl Affinity {
    fn obstacle(&self, site: &NodeSite) -> Option<Obstacle> {
        let missing = |key: &&String| match site.labels.get(*key) {
            None => true,
            Some(value) => {
                let first = self.there.is_empty() && self.itself;
                !first && !self.there.contains_key(&((*key).clone(), value.clone()))
            }
        };
        let topology = self.keys.iter().find(missing)?.clone();
        Some(Obstacle::PodAffinity { topology })
    }
}

impl TopologySpread {
    fn obstacle(&self, site: &NodeSite) -> Option<Obstacle> {
        let skew = match site.labels.get(&self.key) {
            None => None,
            Some(value) => {
                let skew = self.counts.get(value).copied().unwrap_or(0) + self.itself - self.fewest;
                if skew <= i64::from(self.max_skew) {
                    return None;
                }
                Some(skew)
            }
        };
        Some(Obstacle::Spread {
            topology: self.key.clone(),
            max_skew: self.max_skew,
            skew,
        })
    }
}

/// Count the pods that match a constraint's selector, in each domain of the constraint.
fn spread(question: &SnapshotQuestion<'_>, constraint: &TopologySpreadConstraint) -> TopologySpread {
    let (snapshot, wants) = (question.snapshot, &*question.wants);
    let mut selector = constraint.label_selector.clone();
    for key in constraint.match_label_keys.iter().flatten() {
        if let (Some(selector), Some(value)) = (&mut selector, wants.labels.get(key)) {
            require(selector, "In", key, value);
        }
    }
    let selected = |labels: &LabelMap| selector.as_ref().is_some_and(|selector| selects(selector, labels));
    let keys: Vec<&String> = wants
        .spread
        .iter()
        .filter(|one| one.when_unsatisfiable == "DoNotSchedule")
        .map(|one| &one.topology_key)
        .collect();
    let by_affinity = constraint.node_affinity_policy.as_deref() != Some("Ignore");
    let by_taints = constraint.node_taints_policy.as_deref() == Some("Honor");
    let mut counts: BTreeMap<String, i64> = BTreeMap::new();
    for position in 0..snapshot.sites.len() {
        let site = question.site(position);
        let counted = keys.iter().all(|key| site.labels.contains_key(*key))
            && (!by_affinity || node_matches(wants, site))
            && (!by_taints || tolerates(wants, site));
        let Some(value) = site.labels.get(&constraint.topology_key).filter(|_| counted) else {
            continue;
        };
        let here = snapshot.on[position]
            .iter()
            .filter(|tenant| question.counts(**tenant))
            .map(|tenant| &snapshot.tenants[*tenant]);
        let here =
            here.filter(|tenant| !tenant.deleting && *tenant.namespace == *wants.pod.namespace && selected(&tenant.labels));
        let count = i64::try_from(here.count()).unwrap_or(i64::MAX);
        let sum = counts.entry(value.clone()).or_insert(0);
        *sum = sum.saturating_add(count);
    }
    let enough = constraint
        .min_domains
        .is_none_or(|domains| counts.len() >= usize::try_from(domains).unwrap_or(0));
    TopologySpread {
        key: constraint.topology_key.clone(),
        max_skew: constraint.max_skew,
        fewest: if enough {
            counts.values().copied().min().unwrap_or(0)
        } else {
            0
        },
        itself: i64::from(selected(&wants.labels)),
        counts,
    }
}

/// Report whether a term of one pod matches another pod. Both pods are given as (namespace, labels).
fn term_matches(term: &PodAffinityTerm, of: (&str, &LabelMap), pod: (&str, &LabelMap), namespaces: Namespaces<'_>) -> bool {
    let Some(selector) = &term.label_selector else {
        return false;
    };
    let named = term.namespaces.as_deref().unwrap_or_default();
    let in_namespace = match &term.namespace_selector {
        None if named.is_empty() => pod.0 == of.0,
        None => named.iter().any(|name| name == pod.0),
        Some(selector) => {
            let none = LabelMap::new();
            let labels = namespaces.and_then(|namespaces| namespaces.get(pod.0)).unwrap_or(&none);
            named.iter().any(|name| name == pod.0) || selects(selector, labels)
        }
    };
    if !in_namespace || !selects(selector, pod.1) {
        return false;
    }
    let mut more = LabelSelector::default();
    for (keys, operator) in [(&term.match_label_keys, "In"), (&term.mismatch_label_keys, "NotIn")] {
        for key in keys.iter().flatten() {
            if let Some(value) = of.1.get(key) {
                require(&mut more, operator, key, value);
            }
        }
    }
    selects(&more, pod.1)
}

fn require(selector: &mut LabelSelector, operator: &str, key: &str, value: &str) {
    selector
        .match_expressions
        .get_or_insert_default()
        .push(LabelSelectorRequirement {
            key: key.to_owned(),
            operator: operator.to_owned(),
            values: Some(vec![value.to_owned()]),
        });
}
