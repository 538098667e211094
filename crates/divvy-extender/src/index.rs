//! Pods and nodes, change by change, into the ledger. No I/O: a watch, a list or a test feeds it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Error, MemoryUnit, Node, Pod, PodKey};
use divvy_placement::Ledger;

use divvy_kube::convert::{self, ReadPod, UnhealthyGpus};
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::watch::Change;

/// So many pods whose requests cannot be read are remembered by name, and logged once each.
const MOST_UNREADABLE: usize = 1000;

/// What is known of the cluster.
///
/// Changes may come in any order and may be repeated; after each the ledger is that of the objects as they are
/// (research/reliability.md R14). A reset replaces everything of its kind.
#[derive(Debug, Clone)]
pub struct Index {
    ledger: Ledger,
    pods: Feed,
    nodes: Feed,
    unreadable: BTreeMap<String, (PodKey, Error)>,
}

/// How far one of the two watches is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Feed {
    /// Complete lists received: 0 until the first, then one more after each watch that could not be resumed.
    pub lists: u64,
    /// Times that the watch broke.
    pub interruptions: u64,
    /// Why it broke, until it goes on.
    pub trouble: Option<String>,
}

impl Feed {
    fn listed(&mut self) {
        self.lists += 1;
        self.trouble = None;
    }

    fn interrupted(&mut self, why: String) {
        self.interruptions += 1;
        self.trouble = Some(why);
    }
}

impl Index {
    /// An empty index of a cluster that counts gpu-mem in this unit.
    pub fn new(unit: MemoryUnit) -> Index {
        Index {
            ledger: Ledger::new(unit),
            pods: Feed::default(),
            nodes: Feed::default(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Who has what.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// For reservations; objects come through the functions below.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// How far the watch of pods is.
    pub fn pods(&self) -> &Feed {
        &self.pods
    }

    /// How far the watch of nodes is.
    pub fn nodes(&self) -> &Feed {
        &self.nodes
    }

    /// Whether pods and nodes have been listed once: before that, what looks free may be taken.
    pub fn synced(&self) -> bool {
        self.pods.lists > 0 && self.nodes.lists > 0
    }

    /// Pods whose requests cannot be read, by UID; a bounded number of them. They are known nevertheless, with what they hold.
    pub fn unreadable(&self) -> impl Iterator<Item = (&PodKey, &Error)> {
        self.unreadable.values().map(|(key, error)| (key, error))
    }

    /// A pod is there, in this state.
    pub fn apply_pod(&mut self, pod: Pod) {
        self.ledger.apply_pod(pod);
    }

    /// The pod with this UID is gone.
    pub fn delete_pod(&mut self, uid: &str) {
        self.unreadable.remove(uid);
        self.ledger.delete_pod(uid);
    }

    /// Exactly these pods are there.
    pub fn reset_pods(&mut self, pods: Vec<Pod>) {
        self.ledger.replace_pods(pods);
        self.pods.listed();
        let ledger = &self.ledger;
        self.unreadable.retain(|uid, _| ledger.pod(uid).is_some());
    }

    /// A node is there, in this state.
    pub fn apply_node(&mut self, node: &Node) {
        self.ledger.apply_node(node);
    }

    /// The node is gone. Its pods stay until they are gone themselves.
    pub fn delete_node(&mut self, name: &str) {
        self.ledger.delete_node(name);
    }

    /// Exactly these nodes are there.
    pub fn reset_nodes(&mut self, nodes: &[Node]) {
        self.ledger.replace_nodes(nodes);
        self.nodes.listed();
    }

    /// Takes in a change of pods.
    pub fn pod_change(&mut self, change: Change<PodObject>) {
        self.read_pod_change(change.map(ReadPod::from));
    }

    /// Takes in a change of nodes.
    pub fn node_change(&mut self, change: Change<NodeObject>) {
        self.read_node_change(change.map(|object| convert::node(&object)));
    }

    /// As [`Index::pod_change`], of pods that were read when they came.
    pub fn read_pod_change(&mut self, change: Change<ReadPod>) {
        match change {
            Change::Apply(read) => {
                let pod = self.note(read);
                self.apply_pod(pod);
            }
            Change::Delete(read) => self.delete_pod(&read.pod().uid),
            Change::Reset(all) => {
                let pods = all.into_iter().map(|read| self.note(read)).collect();
                self.reset_pods(pods);
            }
            Change::Interrupted(why) => self.pods.interrupted(why),
            Change::Resumed => self.pods.trouble = None,
        }
    }

    /// As [`Index::node_change`], of nodes that were read when they came.
    pub fn read_node_change(&mut self, change: Change<Node>) {
        match change {
            Change::Apply(node) => self.apply_node(&node),
            Change::Delete(node) => self.delete_node(&node.name),
            Change::Reset(nodes) => self.reset_nodes(&nodes),
            Change::Interrupted(why) => self.nodes.interrupted(why),
            Change::Resumed => self.nodes.trouble = None,
        }
    }

    /// Takes in a change of gpushare's ConfigMaps. While their watch is broken what they said last holds.
    pub fn unhealthy_change(&mut self, change: Change<UnhealthyGpus>) {
        match change {
            Change::Apply(named) => self.ledger.name_unhealthy(&named.node, named.gpus),
            Change::Delete(named) => self.ledger.name_unhealthy(&named.node, BTreeSet::new()),
            Change::Reset(all) => self
                .ledger
                .replace_unhealthy(all.into_iter().map(|named| (named.node, named.gpus))),
            Change::Interrupted(_) | Change::Resumed => {}
        }
    }

    fn note(&mut self, read: ReadPod) -> Pod {
        let (pod, trouble) = read.into_parts();
        match trouble {
            None => {
                self.unreadable.remove(&pod.uid);
            }
            Some(error) => {
                let known = self.unreadable.get(&pod.uid).is_some_and(|(_, before)| *before == error);
                if !known && (self.unreadable.len() < MOST_UNREADABLE || self.unreadable.contains_key(&pod.uid)) {
                    tracing::warn!(pod = %pod.key(), %error, "a pod's requests cannot be read; only what it holds is counted");
                    self.unreadable.insert(pod.uid.clone(), (pod.key(), error));
                }
            }
        }
        pod
    }
}

#[cfg(test)]
mod tests;
