use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_kube::watch::WatchChange;
use divvy_model::{Node, Phase, Pod};
use divvy_view::{NodeView, View};

/// What is kept of a pod.
#[derive(Debug, Clone)]
pub(crate) struct KeptPod {
    uid: String,
    /// The pod as the view needs it; `None` if the view does not show it.
    shown: Option<Pod>,
    /// Whether it waits for GPUs.
    waits: bool,
}

impl From<PodObject> for KeptPod {
    fn from(object: PodObject) -> KeptPod {
        let (pod, _) = ReadPod::from(object).into_parts();
        let waits = pod.node.is_none() && pod.request.wants_gpus() && !matches!(pod.phase, Phase::Succeeded | Phase::Failed);
        KeptPod {
            uid: pod.uid.clone(),
            waits,
            shown: divvy_view::shown(pod),
        }
    }
}

/// The nodes and pods as the watches report them.
#[derive(Debug, Default)]
pub(crate) struct WatchedCluster {
    nodes: BTreeMap<String, Node>,
    pods: BTreeMap<String, Pod>,
    /// The UIDs of the pods on each node.
    on: BTreeMap<String, BTreeSet<String>>,
    /// The nodes that the view shows, as they were when it was computed last.
    views: BTreeMap<String, Arc<NodeView>>,
    /// The nodes that may look different since then.
    changed: BTreeSet<String>,
    waiting: BTreeSet<String>,
    /// Whether nodes, and whether pods were listed.
    listed: (bool, bool),
    /// Why the watch of nodes, and that of pods is broken.
    broken: (Option<String>, Option<String>),
}

impl WatchedCluster {
    /// Apply a change of pods.
    pub(crate) fn take_pods(&mut self, change: WatchChange<KeptPod>) {
        match change {
            WatchChange::Apply(pod) => self.take(pod),
            WatchChange::Delete(pod) => {
                self.forget(&pod.uid);
                self.waiting.remove(&pod.uid);
            }
            WatchChange::Reset(all) => {
                self.pods.clear();
                self.waiting.clear();
                self.changed.extend(std::mem::take(&mut self.on).into_keys());
                all.into_iter().for_each(|pod| self.take(pod));
                self.listed.1 = true;
                self.broken.1 = None;
            }
            WatchChange::Interrupted(why) => self.broken.1 = Some(why),
            WatchChange::Resumed => self.broken.1 = None,
        }
    }

    fn take(&mut self, pod: KeptPod) {
        if pod.waits {
            self.waiting.insert(pod.uid.clone())
        } else {
            self.waiting.remove(&pod.uid)
        };
        self.forget(&pod.uid);
        if let Some(shown) = pod.shown {
            if let Some(node) = &shown.node {
                self.on.entry(node.clone()).or_default().insert(pod.uid.clone());
                self.changed.insert(node.clone());
            }
            self.pods.insert(pod.uid, shown);
        }
    }

    /// Remove a pod, and note that its node has changed.
    fn forget(&mut self, uid: &str) {
        let Some(node) = self.pods.remove(uid).and_then(|pod| pod.node) else {
            return;
        };
        if let Some(pods) = self.on.get_mut(&node) {
            pods.remove(uid);
            if pods.is_empty() {
                self.on.remove(&node);
            }
        }
        self.changed.insert(node);
    }

    /// Apply a change of nodes.
    pub(crate) fn take_nodes(&mut self, change: WatchChange<Node>) {
        match change {
            // The kubelet writes the status of a node again and again.
            WatchChange::Apply(node) if self.nodes.get(&node.name) == Some(&node) => {}
            WatchChange::Apply(node) => {
                self.changed.insert(node.name.clone());
                self.nodes.insert(node.name.clone(), node);
            }
            WatchChange::Delete(node) => {
                self.nodes.remove(&node.name);
                self.changed.insert(node.name);
            }
            WatchChange::Reset(all) => {
                let before = std::mem::take(&mut self.nodes);
                self.nodes = all.into_iter().map(|node| (node.name.clone(), node)).collect();
                self.changed.extend(before.into_keys().chain(self.nodes.keys().cloned()));
                self.listed.0 = true;
                self.broken.0 = None;
            }
            WatchChange::Interrupted(why) => self.broken.0 = Some(why),
            WatchChange::Resumed => self.broken.0 = None,
        }
    }

    /// Report whether nodes and pods were listed. Before that, memory that looks free may be in use.
    pub(crate) fn is_listed(&self) -> bool {
        self.listed.0 && self.listed.1
    }

    /// Return the UIDs of the pods that wait for GPUs.
    pub(crate) fn waiting(&self) -> &BTreeSet<String> {
        &self.waiting
    }

    /// Return the allocations. Only nodes that have changed since the last call are computed again.
    pub(crate) fn view(&mut self) -> View {
        for name in std::mem::take(&mut self.changed) {
            let pods = self.on.get(&name).into_iter().flatten();
            let pods = pods.filter_map(|uid| self.pods.get(uid));
            let node = self.nodes.get(&name).cloned().and_then(|node| NodeView::of(node, pods));
            match node {
                Some(node) if self.views.get(&name).is_some_and(|before| **before == node) => {}
                Some(node) => drop(self.views.insert(name, Arc::new(node))),
                None => drop(self.views.remove(&name)),
            }
        }
        View::of(self.views.values().cloned().collect())
    }

    /// Return a sentence for each watch that is broken.
    pub(crate) fn notices(&self) -> impl Iterator<Item = String> {
        let notice = |what: &str, why: &Option<String>| {
            let why = why.as_ref()?;
            Some(format!(
                "Changes of {what} do not arrive, and what is shown is what it was before: {why}"
            ))
        };
        [notice("nodes", &self.broken.0), notice("pods", &self.broken.1)]
            .into_iter()
            .flatten()
    }
}

#[cfg(test)]
mod tests {
    use divvy_testkit::nodes::{divvy_node, divvy_pod, pending};
    use proptest::prelude::*;

    use super::*;

    /// What becomes of one of three nodes or six pods.
    #[derive(Debug, Clone, Copy)]
    enum Step {
        /// The node has so many GPUs; none: it is deleted.
        Node(usize, usize),
        /// The pod is on this node; `None`: it waits.
        Pod(usize, Option<usize>),
        Ended(usize, usize),
        Deleted(usize),
        /// The watches list everything again, without these pods and nodes.
        Listed(usize, usize),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            3 => (0..3_usize, 0..3_usize).prop_map(|(node, gpus)| Step::Node(node, gpus)),
            6 => (0..6_usize, proptest::option::of(0..3_usize)).prop_map(|(pod, node)| Step::Pod(pod, node)),
            1 => (0..6_usize, 0..3_usize).prop_map(|(pod, node)| Step::Ended(pod, node)),
            2 => (0..6_usize).prop_map(Step::Deleted),
            1 => (0..6_usize, 0..3_usize).prop_map(|(pod, node)| Step::Listed(pod, node)),
        ];
        prop::collection::vec(step, 1..40)
    }

    fn node(number: usize, gpus: usize) -> Node {
        divvy_node(&format!("n{number}"), &vec![16; gpus])
    }

    fn pod(number: usize, node: Option<usize>) -> Pod {
        let name = format!("p{number}");
        node.map_or_else(
            || pending(&name, 4),
            |node| divvy_pod(&name, &format!("n{node}"), number % 2, 4),
        )
    }

    fn kept(pod: &Pod) -> KeptPod {
        KeptPod {
            uid: pod.uid.clone(),
            waits: pod.node.is_none(),
            shown: divvy_view::shown(pod.clone()),
        }
    }

    proptest! {
        #[test]
        fn the_view_after_changes_is_the_present_cluster(steps in steps()) {
            let mut cluster = WatchedCluster::default();
            let mut nodes: BTreeMap<usize, Node> = BTreeMap::new();
            let mut pods: BTreeMap<usize, Pod> = BTreeMap::new();
            for step in steps {
                let before = cluster.view();
                match step {
                    Step::Node(number, gpus) => {
                        match (gpus, nodes.remove(&number)) {
                            (0, None) => {}
                            (0, Some(gone)) => cluster.take_nodes(WatchChange::Delete(gone)),
                            _ => {
                                nodes.insert(number, node(number, gpus));
                                cluster.take_nodes(WatchChange::Apply(node(number, gpus)));
                            }
                        }
                    }
                    Step::Pod(number, _) | Step::Ended(number, _) | Step::Deleted(number) => {
                        let new = match step {
                            Step::Pod(_, on) => Some(pod(number, on)),
                            Step::Ended(_, on) => Some(Pod { phase: Phase::Succeeded, ..pod(number, Some(on)) }),
                            _ => None,
                        };
                        let old = match &new {
                            Some(new) => pods.insert(number, new.clone()),
                            None => pods.remove(&number),
                        };
                        match (new, old.as_ref()) {
                            (Some(new), _) => cluster.take_pods(WatchChange::Apply(kept(&new))),
                            (None, Some(old)) => cluster.take_pods(WatchChange::Delete(kept(old))),
                            (None, None) => {}
                        }
                    }
                    Step::Listed(without, gone) => {
                        pods.remove(&without);
                        nodes.remove(&gone);
                        cluster.take_pods(WatchChange::Reset(pods.values().map(kept).collect()));
                        cluster.take_nodes(WatchChange::Reset(nodes.values().cloned().collect()));
                    }
                }
                let view = cluster.view();
                prop_assert_eq!(&view, &divvy_view::view(nodes.values(), pods.values()));
                let waiting: BTreeSet<String> = pods.values().filter(|pod| pod.node.is_none()).map(|pod| pod.uid.clone()).collect();
                prop_assert_eq!(cluster.waiting(), &waiting);
                // A node that looks the same is the same value, so that comparing it costs nothing.
                for node in &view.nodes {
                    let same = before.nodes.iter().find(|of| of.name == node.name && of == &node);
                    prop_assert!(same.is_none_or(|same| Arc::ptr_eq(same, node)), "{}", node.name);
                }
            }
        }
    }
}
