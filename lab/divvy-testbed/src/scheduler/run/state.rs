//! The loop's knowledge of the cluster, and the pods that a change wakes.

use std::collections::BTreeMap;
use std::sync::Arc;

use k8s_openapi::api::core::v1::{Namespace, Node, Pod};
use kube::Resource;

use super::watches::ObjectChange;
use super::{Loop, Placed, name_of, uid_of};
use crate::scheduler::filters::{has_ended, labels_of, node_of};
use crate::scheduler::queue::Rank;
use crate::scheduler::view::{ClusterView, SchedulerNode, SchedulerPod};

impl Loop {
    pub(super) fn pods(&mut self, change: ObjectChange<Pod>) {
        match change {
            ObjectChange::Apply(pod) => self.pod(*pod),
            ObjectChange::Delete(uid) => self.pod_gone(&uid),
            ObjectChange::List(listed) => {
                let known = self.pending.keys().chain(self.bound.keys()).chain(self.assumed.keys());
                let gone: Vec<String> = known.filter(|uid| !listed.contains_key(*uid)).cloned().collect();
                for uid in gone {
                    self.pod_gone(&uid);
                }
                for pod in listed.into_values() {
                    self.pod(pod);
                }
            }
        }
    }

    fn pod(&mut self, pod: Pod) {
        let uid = uid_of(&pod);
        let spec = pod.spec.as_ref();
        if has_ended(&pod) {
            return self.pod_gone(&uid);
        }
        if let Some(node) = node_of(&pod) {
            return self.pod_placed(uid, node, pod);
        }
        let ours = spec
            .and_then(|spec| spec.scheduler_name.as_deref())
            .unwrap_or("default-scheduler")
            == self.config.name;
        let gated = spec
            .and_then(|spec| spec.scheduling_gates.as_ref())
            .is_some_and(|gates| !gates.is_empty());
        if !ours || gated || pod.metadata.deletion_timestamp.is_some() {
            self.queue.remove(&uid);
            self.pending.remove(&uid);
            return;
        }
        let rank = Rank {
            priority: -i64::from(spec.and_then(|spec| spec.priority).unwrap_or(0)),
            created: pod
                .metadata
                .creation_timestamp
                .as_ref()
                .map_or(0, |time| time.0.as_nanosecond()),
            uid: uid.clone(),
        };
        let changed = self.pending.get(&uid).is_some_and(|known| {
            let (new, old) = (&pod.metadata, &known.metadata);
            known.spec != pod.spec || old.annotations != new.annotations || old.labels != new.labels
        });
        self.pending.insert(uid.clone(), Arc::new(pod));
        self.queue.add(rank);
        if changed {
            self.queue.wake(&uid);
        }
    }

    fn pod_placed(&mut self, uid: String, node: String, pod: Pod) {
        self.assumed.remove(&uid);
        self.pending.remove(&uid);
        self.queue.remove(&uid);
        let view = SchedulerPod::of(&pod);
        let counts_alike = |known: &Placed| known.view.labels == view.labels && known.view.terminating == view.terminating;
        if !self.bound.get(&uid).is_some_and(counts_alike) {
            self.queue.wake_minding();
        }
        let pod = Arc::new(pod);
        self.bound.insert(uid, Placed { node, view, pod });
    }

    fn pod_gone(&mut self, uid: &str) {
        self.queue.remove(uid);
        self.pending.remove(uid);
        if self.bound.remove(uid).is_some() || self.assumed.remove(uid).is_some() {
            self.queue.wake_all();
        }
    }

    pub(super) fn nodes(&mut self, change: ObjectChange<Node>) {
        if take_in(&mut self.nodes, change, SchedulerNode::of) {
            self.queue.wake_all();
        }
    }

    pub(super) fn namespaces(&mut self, change: ObjectChange<Namespace>) {
        if take_in(&mut self.namespaces, change, labels_of) {
            self.queue.wake_minding();
        }
    }

    /// Return the current cluster, including pods on their way to a node.
    pub(super) fn cluster(&self) -> ClusterView<'_> {
        let placed = self.bound.values().chain(self.assumed.values());
        ClusterView {
            nodes: &self.nodes,
            pods: placed.map(|placed| (placed.node.as_str(), &placed.view)).collect(),
            namespaces: &self.namespaces,
        }
    }
}

/// Apply a change to a map of the values read from each object. Report whether the map changed.
fn take_in<K: Resource, V: PartialEq>(known: &mut BTreeMap<String, V>, change: ObjectChange<K>, read: impl Fn(&K) -> V) -> bool {
    match change {
        ObjectChange::Apply(object) => {
            let (name, new) = (name_of(&*object), read(&*object));
            let changed = known.get(&name) != Some(&new);
            known.insert(name, new);
            changed
        }
        ObjectChange::Delete(name) => {
            known.remove(&name);
            true
        }
        ObjectChange::List(listed) => {
            let listed = listed.iter().map(|(name, object)| (name.clone(), read(object))).collect();
            let changed = *known != listed;
            *known = listed;
            changed
        }
    }
}
