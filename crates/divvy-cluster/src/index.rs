//! Pods and nodes, change by change, into the ledger. No I/O: a watch, a list or a test feeds it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::{Error, MemoryUnit, Node, Pod, PodKey};
use divvy_placement::Ledger;

use crate::convert::{self, UnhealthyGpus};
use crate::objects::{NodeObject, PodObject};
use crate::watch::Change;

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
    /// Why it broke, until something is received again.
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

    /// Pods whose requests cannot be read, by UID. They are known nevertheless, with what they hold.
    pub fn unreadable(&self) -> impl Iterator<Item = (&PodKey, &Error)> {
        self.unreadable.values().map(|(key, error)| (key, error))
    }

    /// A pod is there, in this state.
    pub fn apply_pod(&mut self, pod: Pod) {
        self.pods.trouble = None;
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
        self.nodes.trouble = None;
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
        match change {
            Change::Apply(object) => {
                let pod = self.read(object);
                self.apply_pod(pod);
            }
            Change::Delete(object) => self.delete_pod(object.metadata.uid.as_deref().unwrap_or_default()),
            Change::Reset(objects) => {
                let pods = objects.into_iter().map(|object| self.read(object)).collect();
                self.reset_pods(pods);
            }
            Change::Interrupted(why) => self.pods.interrupted(why),
        }
    }

    /// Takes in a change of nodes.
    pub fn node_change(&mut self, change: Change<NodeObject>) {
        match change {
            Change::Apply(object) => self.apply_node(&convert::node(&object)),
            Change::Delete(object) => self.delete_node(object.metadata.name.as_deref().unwrap_or_default()),
            Change::Reset(objects) => {
                let nodes: Vec<Node> = objects.iter().map(convert::node).collect();
                self.reset_nodes(&nodes);
            }
            Change::Interrupted(why) => self.nodes.interrupted(why),
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
            Change::Interrupted(_) => {}
        }
    }

    /// A pod whose requests cannot be read still holds what its annotations say: it is taken in without its requests.
    fn read(&mut self, mut object: PodObject) -> Pod {
        let uid = object.metadata.uid.clone().unwrap_or_default();
        match convert::pod(&object) {
            Ok(pod) => {
                self.unreadable.remove(&uid);
                pod
            }
            Err(error) => {
                object.spec.overhead.clear();
                for container in object.spec.init_containers.iter_mut().chain(&mut object.spec.containers) {
                    container.resources = Default::default();
                }
                let pod = convert::pod(&object).unwrap_or_default();
                tracing::warn!(pod = %pod.key(), %error, "a pod's requests cannot be read; only what it holds is counted");
                self.unreadable.insert(uid, (pod.key(), error));
                pod
            }
        }
    }
}

#[cfg(test)]
mod tests;
