//! What would change in a cluster, as a value and as text.

use std::fmt::Write as _;

use divvy_model::PodKey;
use divvy_simulator::what_if::{Cluster, Outcome, Use, asking};
use serde::Serialize;

use crate::printer::columns;

/// The cluster as it is, and as it would be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Answer {
    /// Pods that ask for GPU memory and have not ended: on a node.
    pub placed: u64,
    /// The same: waiting.
    pub waiting: u64,
    /// As it is.
    pub now: Used,
    /// As it would be, by policy.
    pub then: Vec<Then>,
}

/// How much is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Used {
    /// Pods that ask for GPU memory on nodes.
    pub placed: u64,
    /// Nodes with GPUs that may be given, and those of which nothing is.
    pub nodes: u64,
    /// Of those, nodes of whose GPUs nothing is given.
    pub idle_nodes: u64,
    /// GPUs that may be given.
    pub gpus: u64,
    /// Of those, GPUs of which nothing is given.
    pub idle_gpus: u64,
    /// Memory of these GPUs.
    pub memory_mib: u64,
    /// Of that, given.
    pub used_mib: u64,
}

/// What would come of one policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Then {
    /// The policy.
    pub policy: &'static str,
    /// How much would be used.
    #[serde(flatten)]
    pub used: Used,
    /// Pods that were placed anew.
    pub replayed: u64,
    /// Of those, pods on another node than now.
    pub moved: u64,
    /// Pods that stayed where they are because no scheduler decides on them any more.
    pub stayed: u64,
    /// Pods that wait now and would not, `namespace/name`.
    pub would_fit: Vec<String>,
    /// Pods that wait now and would still.
    pub would_wait: Vec<String>,
    /// Pods that are on a node now and would find none.
    pub would_not_fit: Vec<String>,
}

impl From<Use> for Used {
    fn from(of: Use) -> Used {
        Used {
            placed: of.placed,
            nodes: of.nodes,
            idle_nodes: of.idle_nodes,
            gpus: of.gpus,
            idle_gpus: of.idle_gpus,
            memory_mib: of.memory.0,
            used_mib: of.used.0,
        }
    }
}

/// What is printed.
pub fn answer(cluster: &Cluster, outcomes: &[Outcome]) -> Answer {
    let (placed, waiting) = asking(cluster);
    let now = outcomes.first().map(|outcome| outcome.now).unwrap_or_default();
    let names = |keys: &[PodKey]| keys.iter().map(PodKey::to_string).collect();
    let then = outcomes.iter().map(|outcome| Then {
        policy: outcome.policy.name(),
        used: outcome.then.into(),
        replayed: outcome.replayed,
        moved: outcome.moved,
        stayed: outcome.stayed,
        would_fit: names(&outcome.would_fit),
        would_wait: names(&outcome.would_wait),
        would_not_fit: names(&outcome.would_not_fit),
    });
    Answer {
        placed,
        waiting,
        now: now.into(),
        then: then.collect(),
    }
}

/// So many names are printed; `-o json` has them all.
const SHOWN: usize = 10;

/// As text: a line for each policy beside the cluster as it is, then which pods it is about.
pub fn text(answer: &Answer) -> String {
    let mut cells =
        "POLICY\tPLACED\tWAITING\tWOULD FIT\tWOULD NOT FIT\tMOVED\tGPU MEMORY GIVEN\tIDLE GPUS\tIDLE NODES\n".to_owned();
    let shares = |used: &Used| {
        let percent = 100.0 * used.used_mib as f64 / used.memory_mib.max(1) as f64;
        let gib = |mib: u64| mib as f64 / 1024.0;
        format!(
            "{:.1} of {:.1} GiB ({percent:.1} %)\t{} of {}\t{} of {}",
            gib(used.used_mib),
            gib(used.memory_mib),
            used.idle_gpus,
            used.gpus,
            used.idle_nodes,
            used.nodes
        )
    };
    // Writing to a String does not fail.
    let _ = writeln!(
        cells,
        "(now)\t{}\t{}\t-\t-\t-\t{}",
        answer.now.placed,
        answer.waiting,
        shares(&answer.now)
    );
    for then in &answer.then {
        let _ = writeln!(
            cells,
            "{}\t{}\t{}\t{}\t{}\t{}\t{}",
            then.policy,
            then.used.placed,
            then.would_wait.len() + then.would_not_fit.len(),
            then.would_fit.len(),
            then.would_not_fit.len(),
            then.moved,
            shares(&then.used)
        );
    }
    let mut text = columns(&cells);
    for then in &answer.then {
        for (what, names) in [
            ("wait now and would fit", &then.would_fit),
            ("wait now and would still", &then.would_wait),
            ("are on a node now and would find none", &then.would_not_fit),
        ] {
            if names.is_empty() {
                continue;
            }
            let rest = names.len().saturating_sub(SHOWN);
            let more = if rest > 0 {
                format!(", and {rest} more (-o json)")
            } else {
                String::new()
            };
            let _ = writeln!(
                text,
                "\n{}: pods that {what}: {}{more}",
                then.policy,
                names[..names.len() - rest].join(", ")
            );
        }
        if then.stayed > 0 {
            let _ = writeln!(
                text,
                "\n{}: {} pods stay where they are: they are being deleted, or their node is cordoned or offers no GPU",
                then.policy, then.stayed
            );
        }
    }
    text
}
