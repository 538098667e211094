use divvy_placement::policy::{Decision, Demand, Placer, Policy};

use crate::Trace;

/// Under which policy a trace is replayed, and what the policy is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The policy.
    pub policy: Policy,
    /// A policy that learns sees so many of the arrivals and then no more; `None`: all of them.
    pub learn_from: Option<u64>,
    /// Whether pods end, if the policy is told; `None`: it is to see for itself.
    pub pods_end: Option<bool>,
    /// Whether fragmentation is measured on the way, which costs about as much time as deciding.
    pub fragments: bool,
}

impl From<Policy> for Setting {
    /// It learns from all, nothing is said to it, fragmentation is not measured.
    fn from(policy: Policy) -> Setting {
        Setting {
            policy,
            learn_from: None,
            pods_end: None,
            fragments: false,
        }
    }
}

impl Setting {
    /// The trace's nodes, empty.
    pub(crate) fn placer(&self, trace: &Trace, ranks: &[u64]) -> Placer {
        let mut placer = Placer::new(self.policy);
        placer.say_whether_pods_end(self.pods_end);
        for (node, rank) in trace.nodes.iter().zip(ranks) {
            placer.add(node.shape, node.shape.empty(), *rank);
        }
        if self.policy == Policy::Fgd {
            placer.set_mix(&trace.mix());
        }
        placer
    }

    /// Offers a pod; `None` if it fits nowhere.
    pub(crate) fn offer(&self, placer: &mut Placer, demand: &Demand, number: u64) -> Option<Decision> {
        if self.learn_from.is_none_or(|most| number < most) {
            placer.arrived(demand);
        }
        let decision = placer.decide(demand, number)?;
        placer.take(demand, decision).then_some(decision)
    }
}
