//! The changes in a cluster under other policies, units, or nodes: the values and their text.

use std::fmt::Write as _;

use divvy_model::PodKey;
use divvy_simulator::what_if::{CurrentCluster, Use, WhatIfOutcome, asking};
use serde::Serialize;

use crate::printer::columns;

/// The cluster now, and under each policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct WhatIfAnswer {
    /// The number of bound pods that request GPU memory and have not ended.
    pub placed: u64,
    /// The number of waiting pods that request GPU memory.
    pub waiting: u64,
    /// The use of the cluster now.
    pub now: ClusterUse,
    /// The use of the cluster under each policy.
    pub then: Vec<Then>,
}

/// The use of a cluster's GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ClusterUse {
    /// The number of pods that request GPU memory and are on a node.
    pub placed: u64,
    /// The number of nodes with usable GPUs.
    pub nodes: u64,
    /// The number of those nodes without any allocation.
    pub idle_nodes: u64,
    /// The number of usable GPUs.
    pub gpus: u64,
    /// The number of those GPUs without any allocation.
    pub idle_gpus: u64,
    /// The memory of the usable GPUs, in MiB.
    pub memory_mib: u64,
    /// The allocated memory, in MiB.
    pub used_mib: u64,
}

/// The cluster under one policy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Then {
    /// The name of the policy.
    pub policy: &'static str,
    /// The use of the cluster under the policy.
    #[serde(flatten)]
    pub used: ClusterUse,
    /// The number of pods that the simulation placed again.
    pub replayed: u64,
    /// The number of those pods that are on a different node than now.
    pub moved: u64,
    /// The number of pods that the simulation left on their nodes, because they are being deleted, or because their node takes no
    /// new pods or offers no GPU.
    pub stayed: u64,
    /// The pods that wait now but would be placed, as `namespace/name`.
    pub would_fit: Vec<String>,
    /// The pods that wait now and would still wait.
    pub would_wait: Vec<String>,
    /// The pods that are on a node now but would fit on none.
    pub would_not_fit: Vec<String>,
}

impl From<Use> for ClusterUse {
    fn from(of: Use) -> ClusterUse {
        ClusterUse {
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

/// Combine the outcomes for all policies.
pub fn answer(cluster: &CurrentCluster, outcomes: &[WhatIfOutcome]) -> WhatIfAnswer {
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
    WhatIfAnswer {
        placed,
        waiting,
        now: now.into(),
        then: then.collect(),
    }
}

/// The largest number of names in the text; `-o json` has all names.
const SHOWN: usize = 10;

/// Return the text: a table with a line for the current cluster and for each policy, then the names of the affected pods.
pub fn text(answer: &WhatIfAnswer) -> String {
    let mut cells =
        "POLICY\tPLACED\tWAITING\tWOULD FIT\tWOULD NOT FIT\tMOVED\tGPU MEMORY GIVEN\tIDLE GPUS\tIDLE NODES\n".to_owned();
    let shares = |used: &ClusterUse| {
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
            ("wait now and would still wait", &then.would_wait),
            ("are on a node now and would fit on none", &then.would_not_fit),
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
                "\n{}: {} pods stay on their nodes: they are being deleted, or their node is cordoned or offers no GPU",
                then.policy, then.stayed
            );
        }
    }
    text
}
