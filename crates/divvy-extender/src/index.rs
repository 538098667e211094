//! Applies changes of pods and nodes to the ledger. No I/O: a watch, a list, or a test feeds the index.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Error, MemoryUnit, Node, Pod, PodKey};
use divvy_placement::Ledger;

use divvy_kube::convert::{self, ReadPod, UnhealthyGpus};
use divvy_kube::objects::{NodeObject, PodObject};
use divvy_kube::watch::WatchChange;

/// The maximum number of pods with unreadable requests that are remembered by name. Each is logged once.
const MOST_UNREADABLE: usize = 1000;

/// The cluster's pods and nodes, and the ledger computed from them.
///
/// Changes may come in any order and may be repeated. After each change, the ledger depends only on the present state of the
/// objects and not on the order of the changes, so a lost or merged event cannot leave memory counted as used (R14 in
/// `docs/compatibility/races.md`). A reset replaces all objects of its kind.
#[derive(Debug, Clone)]
pub struct Index {
    ledger: Ledger,
    pods: Feed,
    nodes: Feed,
    unreadable: BTreeMap<String, (PodKey, Error)>,
}

/// The state of one of the two watches.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Feed {
    /// The number of complete lists received: 0 before the first list, and one more for each watch that could not be resumed.
    pub lists: u64,
    /// How often the watch has broken.
    pub interruptions: u64,
    /// Why the watch is broken; `None` if it is not.
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
    /// Make an empty index of a cluster with this unit.
    pub fn new(unit: MemoryUnit) -> Index {
        Index {
            ledger: Ledger::new(unit),
            pods: Feed::default(),
            nodes: Feed::default(),
            unreadable: BTreeMap::new(),
        }
    }

    /// Return the ledger.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Return the ledger, to change reservations. Change pods and nodes only through the functions below.
    pub fn ledger_mut(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    /// Return the state of the watch of pods.
    pub fn pods(&self) -> &Feed {
        &self.pods
    }

    /// Return the state of the watch of nodes.
    pub fn nodes(&self) -> &Feed {
        &self.nodes
    }

    /// Report whether pods and nodes have been listed at least once. Before that, memory that looks free may be in use.
    pub fn synced(&self) -> bool {
        self.pods.lists > 0 && self.nodes.lists > 0
    }

    /// Return the pods whose requests cannot be read, in the order of their UIDs; at most 1,000. The ledger still counts what
    /// these pods hold.
    pub fn unreadable(&self) -> impl Iterator<Item = (&PodKey, &Error)> {
        self.unreadable.values().map(|(key, error)| (key, error))
    }

    /// Apply a pod that is new or has changed.
    pub fn apply_pod(&mut self, pod: Pod) {
        self.ledger.apply_pod(pod);
    }

    /// Record that the pod with this UID is gone.
    pub fn delete_pod(&mut self, uid: &str) {
        self.unreadable.remove(uid);
        self.ledger.delete_pod(uid);
    }

    /// Apply a complete list of pods. Pods that are not in the list are gone.
    pub fn reset_pods(&mut self, pods: Vec<Pod>) {
        self.ledger.replace_pods(pods);
        self.pods.listed();
        let ledger = &self.ledger;
        self.unreadable.retain(|uid, _| ledger.pod(uid).is_some());
    }

    /// Apply a node that is new or has changed.
    pub fn apply_node(&mut self, node: &Node) {
        self.ledger.apply_node(node);
    }

    /// Record that a node is gone. Its pods stay in the ledger until they are gone as well.
    pub fn delete_node(&mut self, name: &str) {
        self.ledger.delete_node(name);
    }

    /// Apply a complete list of nodes. Nodes that are not in the list are gone.
    pub fn reset_nodes(&mut self, nodes: &[Node]) {
        self.ledger.replace_nodes(nodes);
        self.nodes.listed();
    }

    /// Apply a change of pods.
    pub fn pod_change(&mut self, change: WatchChange<PodObject>) {
        self.read_pod_change(change.map(ReadPod::from));
    }

    /// Apply a change of nodes.
    pub fn node_change(&mut self, change: WatchChange<NodeObject>) {
        self.read_node_change(change.map(|object| convert::node(&object)));
    }

    /// Apply a change of pods, as [`Index::pod_change`] does, for pods that are already converted.
    pub fn read_pod_change(&mut self, change: WatchChange<ReadPod>) {
        match change {
            WatchChange::Apply(read) => {
                let pod = self.note(read);
                self.apply_pod(pod);
            }
            WatchChange::Delete(read) => self.delete_pod(&read.pod().uid),
            WatchChange::Reset(all) => {
                let pods = all.into_iter().map(|read| self.note(read)).collect();
                self.reset_pods(pods);
            }
            WatchChange::Interrupted(why) => self.pods.interrupted(why),
            WatchChange::Resumed => self.pods.trouble = None,
        }
    }

    /// Apply a change of nodes, as [`Index::node_change`] does, for nodes that are already converted.
    pub fn read_node_change(&mut self, change: WatchChange<Node>) {
        match change {
            WatchChange::Apply(node) => self.apply_node(&node),
            WatchChange::Delete(node) => self.delete_node(&node.name),
            WatchChange::Reset(nodes) => self.reset_nodes(&nodes),
            WatchChange::Interrupted(why) => self.nodes.interrupted(why),
            WatchChange::Resumed => self.nodes.trouble = None,
        }
    }

    /// Apply a change of gpushare's ConfigMaps. While their watch is broken, their last content stays valid.
    pub fn unhealthy_change(&mut self, change: WatchChange<UnhealthyGpus>) {
        match change {
            WatchChange::Apply(named) => self.ledger.name_unhealthy(&named.node, named.gpus),
            WatchChange::Delete(named) => self.ledger.name_unhealthy(&named.node, BTreeSet::new()),
            WatchChange::Reset(all) => self
                .ledger
                .replace_unhealthy(all.into_iter().map(|named| (named.node, named.gpus))),
            WatchChange::Interrupted(_) | WatchChange::Resumed => {}
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
                    tracing::warn!(pod = %pod.key(), %error, "a pod's requests cannot be read; only the memory that it holds is counted");
                    self.unreadable.insert(pod.uid.clone(), (pod.key(), error));
                }
            }
        }
        pod
    }
}

#[cfg(test)]
mod tests;
