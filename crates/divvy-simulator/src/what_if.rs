//! The pods of a real cluster, placed again: under another policy, with another unit, or with more nodes.
//!
//! The simulation uses the extender's ledger and policies. Of kube-scheduler's own checks, it includes nodeSelectors,
//! cordons, CPU, main memory, and the number of pods. It does not include taints, affinity, quotas, or priorities.

mod change;
mod place;

use std::borrow::Cow;
use std::collections::BTreeMap;

use divvy_model::{Health, MemoryUnit, MiB, Node, Pod, PodKey};
use divvy_placement::{Ledger, LedgerNode};
use divvy_policy::Policy;

use crate::Error;
use place::Placing;

/// A node with its labels, by which pods select nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterNode {
    pub node: Node,
    /// The node's labels.
    pub labels: BTreeMap<String, String>,
}

/// A pod with the facts that its request does not contain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterPod {
    pub pod: Pod,
    /// `metadata.creationTimestamp` in Unix seconds.
    pub created: i64,
    /// `spec.nodeSelector`.
    pub selector: BTreeMap<String, String>,
}

/// A cluster as it is now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CurrentCluster {
    /// The cluster's unit of gpu-mem.
    pub unit: MemoryUnit,
    /// The nodes, in any order.
    pub nodes: Vec<ClusterNode>,
    /// The pods, in any order.
    pub pods: Vec<ClusterPod>,
}

/// A change of the cluster that is simulated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SimulatedChange {
    /// The policy that places the pods.
    pub policy: Policy,
    /// Another unit of gpu-mem. Pods request the same memory as now, rounded up to the new unit, and GPUs offer the same memory,
    /// rounded down.
    pub unit: Option<MemoryUnit>,
    /// The number of nodes to add, and the name of the node to copy. Without a name, the most frequent kind of node with GPUs is
    /// copied.
    pub add: Option<(u32, Option<String>)>,
    /// Whether bound pods stay where they are, so that only the others are placed.
    pub keep_bound: bool,
}

/// How a cluster is used.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Use {
    /// The number of pods that request GPU memory and are on a node.
    pub placed: u64,
    /// The number of GPUs on which pods may be placed.
    pub gpus: u64,
    /// The number of these GPUs that are completely unused.
    pub idle_gpus: u64,
    /// The number of nodes with GPUs on which pods may be placed.
    pub nodes: u64,
    /// The number of these nodes whose GPUs are all unused.
    pub idle_nodes: u64,
    /// The memory of the GPUs on which pods may be placed.
    pub memory: MiB,
    /// The used part of this memory.
    pub used: MiB,
}

/// The result of a change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WhatIfOutcome {
    /// The policy that placed the pods.
    pub policy: Policy,
    /// The cluster's use now.
    pub now: Use,
    /// The cluster's use after the change.
    pub then: Use,
    /// The number of pods that were placed again.
    pub replayed: u64,
    /// The number of these pods that would be on another node than now.
    pub moved: u64,
    /// The number of pods that stay where they are although [`SimulatedChange::keep_bound`] does not require it: pods that are being
    /// deleted, and pods whose node is cordoned or offers no GPU.
    pub stayed: u64,
    /// The pods that are waiting now and would be placed.
    pub would_fit: Vec<PodKey>,
    /// The pods that are waiting now and would still wait.
    pub would_wait: Vec<PodKey>,
    /// The pods that are on a node now and would not be placed.
    pub would_not_fit: Vec<PodKey>,
}

/// Create a ledger with the cluster's nodes and these pods.
fn ledger<'a>(cluster: &CurrentCluster, pods: impl IntoIterator<Item = &'a ClusterPod>) -> Ledger {
    let mut ledger = Ledger::new(cluster.unit);
    ledger.replace_nodes(cluster.nodes.iter().map(|node| &node.node));
    ledger.replace_pods(pods.into_iter().map(|pod| pod.pod.clone()));
    ledger
}

/// Return two numbers of pods that request GPU memory and have not ended: those on a node, and those that are waiting.
pub fn asking(cluster: &CurrentCluster) -> (u64, u64) {
    let asking = cluster.pods.iter().map(|pod| &pod.pod);
    let (bound, waiting): (Vec<&Pod>, Vec<&Pod>) = asking
        .filter(|pod| pod.request.wants_memory() && !pod.ended())
        .partition(|pod| pod.node.is_some());
    (bound.len() as u64, waiting.len() as u64)
}

/// Place the pods that request GPU memory again, in the order in which they were created. Other pods stay where they are. So do
/// pods with whole GPUs, and pods that no scheduler could move.
///
/// As in the extender, a policy knows only the pods that came before.
///
/// # Errors
///
/// Fails if no node has GPUs, or if the node to copy does not exist.
pub fn what_if(cluster: &CurrentCluster, change: &SimulatedChange) -> Result<WhatIfOutcome, Error> {
    let changed = change::apply(cluster, change)?;
    let bound = |pod: &&ClusterPod| pod.pod.node.is_some() && !pod.pod.ended();
    let today = ledger(cluster, cluster.pods.iter().filter(bound));
    let mut outcome = WhatIfOutcome {
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
    // Building the ledger of a large cluster takes a moment. If no bound pod can move and no node changes, the present ledger is
    // reused.
    let begin = if same && replayed.iter().all(|pod| pod.pod.node.is_none()) {
        before
    } else {
        drop(before);
        ledger(&changed, staying)
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

/// Report whether a scheduler would place pods on a node.
fn offered(ledger: &Ledger, node: &str) -> bool {
    let view = ledger.node(node);
    let state = view.as_ref().and_then(LedgerNode::state);
    state.is_some_and(|state| {
        !state.unschedulable && state.unusable(None).is_none() && state.gpus.iter().any(|gpu| gpu.is_shared())
    })
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
        let shared = state.gpus.iter().enumerate().filter(|(_, gpu)| gpu.is_shared());
        let well = shared.filter(|(_, gpu)| gpu.health == Health::Ok);
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
    /// Format the use as `312.0 of 400.0 GiB`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "{:.1} of {:.1} GiB",
            self.used.0 as f64 / 1024.0,
            self.memory.0 as f64 / 1024.0
        )
    }
}
