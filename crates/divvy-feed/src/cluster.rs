use std::collections::{BTreeMap, BTreeSet};

use divvy_kube::convert::ReadPod;
use divvy_kube::objects::PodObject;
use divvy_kube::watch::Change;
use divvy_model::{Node, Phase, Pod};
use divvy_view::View;

/// What is kept of a pod.
#[derive(Debug, Clone)]
pub(crate) struct Kept {
    uid: String,
    /// The pod as the view needs it; `None` if the view does not show it.
    shown: Option<Pod>,
    /// Whether it waits for GPUs.
    waits: bool,
}

impl From<PodObject> for Kept {
    fn from(object: PodObject) -> Kept {
        let (pod, _) = ReadPod::from(object).into_parts();
        let waits = pod.node.is_none() && pod.request.wants_gpus() && !matches!(pod.phase, Phase::Succeeded | Phase::Failed);
        Kept {
            uid: pod.uid.clone(),
            waits,
            shown: divvy_view::shown(pod),
        }
    }
}

/// The nodes and pods as the watches report them.
#[derive(Debug, Default)]
pub(crate) struct Cluster {
    nodes: BTreeMap<String, Node>,
    pods: BTreeMap<String, Pod>,
    waiting: BTreeSet<String>,
    /// Whether nodes, and whether pods were listed.
    listed: (bool, bool),
    /// Why the watch of nodes, and that of pods is broken.
    broken: (Option<String>, Option<String>),
}

impl Cluster {
    /// Apply a change of pods.
    pub(crate) fn take_pods(&mut self, change: Change<Kept>) {
        match change {
            Change::Apply(pod) => self.take(pod),
            Change::Delete(pod) => {
                self.pods.remove(&pod.uid);
                self.waiting.remove(&pod.uid);
            }
            Change::Reset(all) => {
                self.pods.clear();
                self.waiting.clear();
                all.into_iter().for_each(|pod| self.take(pod));
                self.listed.1 = true;
                self.broken.1 = None;
            }
            Change::Interrupted(why) => self.broken.1 = Some(why),
            Change::Resumed => self.broken.1 = None,
        }
    }

    fn take(&mut self, pod: Kept) {
        match pod.waits {
            true => self.waiting.insert(pod.uid.clone()),
            false => self.waiting.remove(&pod.uid),
        };
        match pod.shown {
            Some(shown) => self.pods.insert(pod.uid, shown),
            None => self.pods.remove(&pod.uid),
        };
    }

    /// Apply a change of nodes.
    pub(crate) fn take_nodes(&mut self, change: Change<Node>) {
        match change {
            Change::Apply(node) => drop(self.nodes.insert(node.name.clone(), node)),
            Change::Delete(node) => drop(self.nodes.remove(&node.name)),
            Change::Reset(all) => {
                self.nodes = all.into_iter().map(|node| (node.name.clone(), node)).collect();
                self.listed.0 = true;
                self.broken.0 = None;
            }
            Change::Interrupted(why) => self.broken.0 = Some(why),
            Change::Resumed => self.broken.0 = None,
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

    /// Compute the allocations.
    pub(crate) fn view(&self) -> View {
        divvy_view::view(self.nodes.values(), self.pods.values())
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
