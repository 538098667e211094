//! Made-up clusters as a [`View`], with what their agents measure and the pods that wait. The views are made by [`divvy_view::view`] from nodes and pods, as in
//! the programs.

#![forbid(unsafe_code)]

mod build;
mod mixed;

use std::collections::BTreeMap;

use divvy_model::usage::Usage;
use divvy_view::{NoUsage, View, WaitingPod, view};

pub use build::{ViewSimNode, ViewSimShare};
pub use mixed::{HOSTILE, mixed};

/// When the first step is, in seconds since 1970.
const START: u64 = 1_795_845_600;

/// A cluster at one time.
#[derive(Debug, Clone, Default)]
pub struct ClusterMoment {
    /// The time, in seconds since 1970: each step is a minute.
    pub at: u64,
    /// The allocations.
    pub view: View,
    /// What the agents answer, by node.
    pub usage: BTreeMap<String, Result<Usage, NoUsage>>,
    /// The pods that wait.
    pub waiting: Vec<WaitingPod>,
}

impl ClusterMoment {
    /// Make a cluster of these machines.
    pub fn of(machines: &[ViewSimNode], step: u64) -> ClusterMoment {
        let nodes: Vec<_> = machines.iter().map(ViewSimNode::node).collect();
        let pods: Vec<_> = machines.iter().flat_map(ViewSimNode::pods).collect();
        let at = START + step * 60;
        ClusterMoment {
            at,
            view: view(&nodes, &pods),
            usage: machines
                .iter()
                .filter_map(|machine| Some((machine.name.clone(), machine.answer(at)?)))
                .collect(),
            waiting: Vec::new(),
        }
    }
}

/// Make a cluster of equal machines with eight GPUs, each with so many pods. `step` changes what they use.
pub fn equal(machines: u64, pods: u64, step: u64) -> ClusterMoment {
    let names = ["trainer", "notebook", "inference", "embedding", "batch"];
    let namespaces = ["research", "platform", "team-a", "team-b", "vision", "audio"];
    let one = |number: u64| {
        let mut machine = ViewSimNode::new(format!("gpu-{number:04}"), "NVIDIA A100-SXM4-80GB", 80, 8);
        for at in 0..8 * pods {
            let seed = number * 8 * pods + at;
            let name = format!(
                "{}-{:05x}",
                names[(seed % 5) as usize],
                seed.wrapping_mul(0x9e37_79b9) & 0xf_ffff
            );
            let namespace = namespaces[(seed / 3 % 6) as usize];
            let gib = 8 + seed % 12;
            let used = gib * 1024 * ((seed * 7 + step) % 100) / 100;
            machine =
                machine.pod(ViewSimShare::new(namespace, &name, (at / pods) as usize, gib).uses(used, (seed * 11 + step) % 101));
        }
        machine
    };
    let machines: Vec<ViewSimNode> = (0..machines).map(one).collect();
    ClusterMoment::of(&machines, step)
}
