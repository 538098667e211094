use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Phase, Pod};
use divvy_placement::{Ask, Ledger, LedgerNode};
use divvy_policy::{CacheLimits, Fleet, Policy};

use super::{ClusterNode, ClusterPod, offered};

/// A ledger on which pods are placed as kube-scheduler and the extender would do it: kube-scheduler filters the nodes, and the
/// extender ranks the remaining ones and chooses the GPU.
#[derive(Debug)]
pub(super) struct Placing {
    ledger: Ledger,
    fleet: Fleet,
    /// The nodes that may be used, by name, with their labels.
    nodes: BTreeMap<String, BTreeMap<String, String>>,
    /// Those of `nodes` that already have as many pods as they may have.
    full: BTreeSet<String>,
}

impl Placing {
    pub(super) fn new(policy: Policy, ledger: Ledger, nodes: &[ClusterNode]) -> Placing {
        let open = nodes.iter().filter(|node| offered(&ledger, &node.node.name));
        let nodes: BTreeMap<_, _> = open.map(|node| (node.node.name.clone(), node.labels.clone())).collect();
        let full = nodes.keys().filter(|name| is_full(&ledger, name)).cloned();
        Placing {
            full: full.collect(),
            fleet: Fleet::new(policy, CacheLimits::default()),
            nodes,
            ledger,
        }
    }

    /// Place the pod and return its node. The result is `None` if the pod fits nowhere.
    pub(super) fn place(&mut self, pod: &ClusterPod) -> Option<String> {
        let ask = Ask::of(&pod.pod.request, self.ledger.unit());
        self.fleet.follow(&self.ledger);
        self.fleet.arrived(&pod.pod, &self.ledger);
        let selected = |labels: &BTreeMap<String, String>| pod.selector.iter().all(|(key, value)| labels.get(key) == Some(value));
        let among = self
            .nodes
            .iter()
            .filter(|(name, labels)| !self.full.contains(*name) && selected(labels));
        let among: Vec<&str> = among.map(|(name, _)| name.as_str()).collect();
        let best = self.fleet.rank(&pod.pod, &ask, among.iter().copied(), &self.ledger).best?;
        let name = (*among.get(best)?).to_owned();
        let choice = self.fleet.choose(&pod.pod, &ask, &name, &self.ledger)?;
        self.ledger.apply_pod(Pod {
            node: Some(name.clone()),
            phase: Phase::Running,
            held: choice.held(&pod.pod.request, self.ledger.unit()),
            ..pod.pod.clone()
        });
        if is_full(&self.ledger, &name) {
            self.full.insert(name.clone());
        }
        Some(name)
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }
}

fn is_full(ledger: &Ledger, name: &str) -> bool {
    let full = |view: LedgerNode<'_>| {
        view.state()
            .is_some_and(|state| state.pods > 0 && view.requested().2 >= state.pods)
    };
    ledger.node(name).is_some_and(full)
}
