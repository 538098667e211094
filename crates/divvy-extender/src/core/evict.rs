//! Evictions of pods whose programs do not keep to the pods' shares of GPUs.
//!
//! A node's agent finds such pods and names them in its inventory ([`divvy_model::Inventory::evict`]). It has no right to evict them: with that right, the token
//! of one node would be enough to evict every pod of the cluster. The leader evicts a pod only if the pod is bound to the node that names it, and requests
//! GPUs. A node has the power to stop these pods in any case.
//!
//! The API server decides about an eviction, and refuses it if a `PodDisruptionBudget` forbids it at the moment. The leader then asks again, as long as
//! the node names the pod.

use std::collections::{BTreeMap, BTreeSet};

use divvy_kube::watch::WatchChange;
use divvy_model::{Node, Pod, PodKey};
use serde_json::{Value, json};

use super::{ExtenderAction, ExtenderCore, Lead, Now, Posted};

/// The pause between two requests to evict the same pod.
const PAUSE_NS: u64 = 10_000_000_000;
/// The maximum number of requests that follow from one change, or from one sweep.
const AT_ONCE: usize = 16;

/// The pods to evict.
#[derive(Debug, Default)]
pub(super) struct Evictions {
    /// UIDs by the node that names them. Nodes that name none are absent.
    named: BTreeMap<String, BTreeSet<String>>,
    /// When the API server was last asked to evict the pod, by UID.
    asked: BTreeMap<String, u64>,
    /// UIDs of the pods for which a warning event says that the API server refuses the eviction.
    told: BTreeSet<String>,
}

impl Evictions {
    /// Take in which pods the nodes of a change name.
    pub(super) fn node_change(&mut self, change: &WatchChange<Node>) {
        match change {
            WatchChange::Apply(node) => self.name(node),
            WatchChange::Delete(node) => drop(self.named.remove(&node.name)),
            WatchChange::Reset(nodes) => {
                self.named.clear();
                nodes.iter().for_each(|node| self.name(node));
            }
            WatchChange::Interrupted(_) | WatchChange::Resumed => return,
        }
        let named = &self.named;
        let is_named = |uid: &String| named.values().any(|uids| uids.contains(uid));
        self.asked.retain(|uid, _| is_named(uid));
        self.told.retain(is_named);
    }

    fn name(&mut self, node: &Node) {
        match &node.inventory {
            Some(Ok(inventory)) if !inventory.evict.is_empty() => {
                self.named.insert(node.name.clone(), inventory.evict.clone());
            }
            _ => drop(self.named.remove(&node.name)),
        }
    }
}

impl ExtenderCore {
    /// Return the evictions that are due.
    pub(super) fn evictions(&mut self, now: Now) -> Vec<ExtenderAction> {
        if self.lead != Lead::Leads || self.evictions.named.is_empty() {
            return Vec::new();
        }
        let (ledger, asked) = (self.index.ledger(), &self.evictions.asked);
        let is_due = |uid: &str| {
            let last = asked.get(uid);
            last.is_none_or(|last| now.monotonic_ns.saturating_sub(*last) >= PAUSE_NS)
        };
        let named = self.evictions.named.iter();
        let due = named.flat_map(|(node, uids)| uids.iter().filter_map(move |uid| evictable(ledger.pod(uid)?, node)));
        let due: Vec<&Pod> = due.filter(|pod| is_due(&pod.uid)).take(AT_ONCE).collect();
        let due: Vec<(String, PodKey)> = due.into_iter().map(|pod| (pod.uid.clone(), pod.key())).collect();
        for (uid, _) in &due {
            self.evictions.asked.insert(uid.clone(), now.monotonic_ns);
        }
        due.into_iter().map(|(uid, pod)| ExtenderAction::Evict { uid, pod }).collect()
    }

    /// Handle the API server's answer to an [`ExtenderAction::Evict`].
    pub fn evicted(&mut self, uid: &str, outcome: Posted) -> Vec<ExtenderAction> {
        match outcome {
            Posted::Created => self.counts.evicted += 1,
            // The pod is gone.
            Posted::NotFound(_) | Posted::Conflict(_) | Posted::NotSent(_) => {}
            Posted::Refused(text) => {
                self.counts.evictions_refused += 1;
                return self.refused_eviction(uid, &text).into_iter().collect();
            }
            Posted::Unknown(_) => self.counts.evictions_unknown += 1,
        }
        Vec::new()
    }

    fn refused_eviction(&mut self, uid: &str, text: &str) -> Option<ExtenderAction> {
        let pod = self.index.ledger().pod(uid)?.key();
        let hint = if text.contains("(403 ") {
            ". Install Divvy's chart with agent.onEscape=evict, which gives the extender this right"
        } else {
            ""
        };
        self.evictions.told.insert(uid.to_owned()).then(|| ExtenderAction::Warn {
            pod,
            uid: uid.to_owned(),
            action: "Evicting",
            reason: "EvictionRefused",
            text: format!(
                "a program of this pod does not keep to the pod's share of a GPU, and the node's agent wants the pod to be evicted (--on-escape evict), but the API \
                 server refuses: {text}. The extender asks again every {} s{hint}",
                PAUSE_NS / 1_000_000_000
            ),
        })
    }
}

/// Return the pod if the node may have it evicted.
fn evictable<'a>(pod: &'a Pod, node: &str) -> Option<&'a Pod> {
    let is_here = pod.node.as_deref() == Some(node);
    (is_here && pod.request.wants_gpus() && !pod.deleting && !pod.ended()).then_some(pod)
}

/// Return the body of `POST pods/NAME/eviction` (`policy/v1`).
pub fn eviction(pod: &PodKey, uid: &str) -> Value {
    json!({
        "apiVersion": "policy/v1",
        "kind": "Eviction",
        "metadata": {"name": pod.name, "namespace": pod.namespace},
        "deleteOptions": {"preconditions": {"uid": uid}},
    })
}
