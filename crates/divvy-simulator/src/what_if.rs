//! A cluster's own pods, placed anew: under another policy, in other units, with more nodes.
//!
//! Runs the extender's ledger and the extender's policies. What kube-scheduler looks at beside them is looked at as far as nodeSelectors, cordons, CPU,
//! main memory and the number of pods go; taints, affinity, quotas and priorities are not.

mod change;
mod place;

use std::borrow::Cow;
use std::collections::BTreeMap;

use divvy_model::{Health, MemoryUnit, MiB, Node, Pod, PodKey};
use divvy_placement::{Ledger, NodeView, Source};
use divvy_policy::Policy;

use crate::Error;
use place::Placing;

/// A node with what pods select it by.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterNode {
    /// The node.
    pub node: Node,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
}

/// A pod with what is known of it beside what it asks for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterPod {
    /// The pod.
    pub pod: Pod,
    /// metadata.creationTimestamp in Unix seconds.
    pub created: i64,
    /// spec.nodeSelector.
    pub selector: BTreeMap<String, String>,
}

/// A cluster as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cluster {
    /// Its unit of GPU memory.
    pub unit: MemoryUnit,
    /// Nodes in any order.
    pub nodes: Vec<ClusterNode>,
    /// Pods in any order.
    pub pods: Vec<ClusterPod>,
}

/// What is to be otherwise.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// Which policy places the pods.
    pub policy: Policy,
    /// Another unit: pods ask for the memory that they ask for now, rounded up, and GPUs offer what they have, rounded down.
    pub unit: Option<MemoryUnit>,
    /// So many more nodes like the one of this name; without a name like the most frequent one with GPUs.
    pub add: Option<(u32, Option<String>)>,
    /// Pods that are bound stay where they are, and only the others are placed.
    pub keep_bound: bool,
}

/// A cluster's use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Use {
    /// Pods that ask for GPU memory and are on a node.
    pub placed: u64,
    /// GPUs that may be given.
    pub gpus: u64,
    /// Of those, GPUs of which nothing is given.
    pub idle_gpus: u64,
    /// Nodes with GPUs that may be given.
    pub nodes: u64,
    /// Of those, nodes of whose GPUs nothing is given.
    pub idle_nodes: u64,
    /// Memory of the GPUs that may be given.
    pub memory: MiB,
    /// Of that, given.
    pub used: MiB,
}

/// What would come of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// Under this policy.
    pub policy: Policy,
    /// As it is now.
    pub now: Use,
    /// As it would be.
    pub then: Use,
    /// Pods that were placed anew.
    pub replayed: u64,
    /// Of those, pods on another node than now.
    pub moved: u64,
    /// Pods that stayed where they are without being asked: they are being deleted, or their node is cordoned or offers no GPU.
    pub stayed: u64,
    /// Pods that wait now and would not.
    pub would_fit: Vec<PodKey>,
    /// Pods that wait now and would still.
    pub would_wait: Vec<PodKey>,
    /// Pods that are on a node now and would find none.
    pub would_not_fit: Vec<PodKey>,
}

/// A cluster's nodes with some of its pods.
fn ledger<'a>(cluster: &Cluster, pods: impl IntoIterator<Item = &'a ClusterPod>) -> Ledger {
    let mut ledger = Ledger::new(cluster.unit);
    ledger.replace_nodes(cluster.nodes.iter().map(|node| &node.node));
    ledger.replace_pods(pods.into_iter().map(|pod| pod.pod.clone()));
    ledger
}

/// Pods that ask for GPU memory and have not ended: those that are on a node, and those that wait.
pub fn asking(cluster: &Cluster) -> (u64, u64) {
    let asking = cluster.pods.iter().map(|pod| &pod.pod);
    let (bound, waiting): (Vec<&Pod>, Vec<&Pod>) = asking
        .filter(|pod| pod.request.wants_memory() && !pod.ended())
        .partition(|pod| pod.node.is_some());
    (bound.len() as u64, waiting.len() as u64)
}

/// Places the pods that ask for GPU memory anew, in the order in which they were created. Those that do not ask for any stay where they
/// are, and so do those whose place is not up to a scheduler any more.
///
/// As in the extender a policy knows the pods that came before.
///
/// # Errors
///
/// When there is no node with GPUs, or none of the name that more are to be like.
pub fn what_if(cluster: &Cluster, change: &Change) -> Result<Outcome, Error> {
    let changed = change::apply(cluster, change)?;
    let bound = |pod: &&ClusterPod| pod.pod.node.is_some() && !pod.pod.ended();
    let today = ledger(cluster, cluster.pods.iter().filter(bound));
    let mut outcome = Outcome {
        policy: change.policy,
        now: used(&today),
        then: Use::default(),
        replayed: 0,
        moved: 0,
        stayed: 0,
        would_fit: Vec::new(),
        would_wait: Vec::new(),
        would_not_fit: Vec::new(),
    };
    let same = matches!(changed, Cow::Borrowed(_));
    let before = if same { today } else { ledger(&changed, []) };
    let (mut replayed, mut staying): (Vec<&ClusterPod>, Vec<&ClusterPod>) = (Vec::new(), Vec::new());
    for pod in changed.pods.iter().filter(|pod| !pod.pod.ended()) {
        let asks = pod.pod.request.wants_memory();
        let stays = pod
            .pod
            .node
            .as_ref()
            .is_some_and(|node| pod.pod.deleting || !offered(&before, node));
        if asks && !stays && !(change.keep_bound && pod.pod.node.is_some()) {
            replayed.push(pod);
            continue;
        }
        outcome.stayed += u64::from(asks && stays);
        if pod.pod.node.is_some() {
            staying.push(pod);
        }
    }
    // The ledger of a large cluster takes a moment to build. If no bound pod can move and no node changes, today's ledger serves.
    let begin = match same && replayed.iter().all(|pod| pod.pod.node.is_none()) {
        true => before,
        false => {
            drop(before);
            ledger(&changed, staying)
        }
    };
    replayed.sort_by(|a, b| (a.created, &a.pod.namespace, &a.pod.name).cmp(&(b.created, &b.pod.namespace, &b.pod.name)));
    let mut placing = Placing::new(change.policy, begin, &changed.nodes);
    for pod in replayed {
        outcome.replayed += 1;
        let placed = placing.place(pod);
        let list = match (&pod.pod.node, placed) {
            (Some(before), Some(node)) => {
                outcome.moved += u64::from(*before != node);
                continue;
            }
            (None, Some(_)) => &mut outcome.would_fit,
            (Some(_), None) => &mut outcome.would_not_fit,
            (None, None) => &mut outcome.would_wait,
        };
        list.push(pod.pod.key());
    }
    outcome.then = used(placing.ledger());
    Ok(outcome)
}

/// Whether a scheduler would put pods there.
fn offered(ledger: &Ledger, node: &str) -> bool {
    let view = ledger.node(node);
    let state = view.as_ref().and_then(NodeView::state);
    state.is_some_and(|state| !state.unschedulable && !matches!(state.source, Source::Unusable(_)))
}

fn used(ledger: &Ledger) -> Use {
    let mut sum = Use::default();
    for view in ledger.nodes() {
        let pods = view.pods().filter(|pod| pod.request.wants_memory());
        sum.placed += pods.count() as u64;
        if !offered(ledger, view.name()) {
            continue;
        }
        let Some(state) = view.state() else { continue };
        let well = state.gpus.iter().enumerate().filter(|(_, gpu)| gpu.health == Health::Ok);
        let mut idle = true;
        for (position, gpu) in well {
            let used = gpu.capacity.saturating_sub(view.free(position));
            sum.gpus += 1;
            sum.idle_gpus += u64::from(used == MiB::ZERO);
            idle &= used == MiB::ZERO;
            sum.memory = sum.memory.saturating_add(gpu.capacity);
            sum.used = sum.used.saturating_add(used);
        }
        sum.nodes += 1;
        sum.idle_nodes += u64::from(idle);
    }
    sum
}

impl std::fmt::Display for Use {
    /// `312 of 400 GiB`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} of {:.1} GiB",
            self.used.0 as f64 / 1024.0,
            self.memory.0 as f64 / 1024.0
        )
    }
}
