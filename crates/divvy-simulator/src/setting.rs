use divvy_policy::{Decision, Demand, NodeId, Placer, Policy};

use crate::Trace;
use crate::random::Random;

/// The policy under which a trace is simulated, and what the policy knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Setting {
    /// The policy.
    pub policy: Policy,
    /// The number of arrivals that a learning policy sees; `None` if it sees all of them.
    pub learn_from: Option<u64>,
    /// Whether pods end, if this is set by hand. `None` lets the policy measure it.
    pub pods_end: Option<bool>,
    /// How a node is chosen from the policy's costs.
    pub choice: NodeChoice,
}

/// How a node is chosen from the policy's costs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum NodeChoice {
    /// The best node; on a tie, the one with the lowest rank.
    #[default]
    Best,
    /// A random node among those with the least cost, as kube-scheduler chooses among nodes with equal scores.
    Lot,
    /// A random node among those with a score of 10. Costs are first scaled to integer scores, rounded to the nearest: 0 for the
    /// worst node, 10 for the best. This is the result of a scheduler extender whose scores do not distinguish the best node from
    /// nodes that are nearly as good.
    Scores,
}

impl From<Policy> for Setting {
    /// Return the default setting: the policy learns from all arrivals, nothing is set by hand, and the best node is chosen.
    fn from(policy: Policy) -> Setting {
        Setting {
            policy,
            learn_from: None,
            pods_end: None,
            choice: NodeChoice::Best,
        }
    }
}

/// The nodes of a trace, with a placer for this setting.
#[derive(Debug)]
pub(crate) struct SettingNodes {
    setting: Setting,
    pub(crate) placer: Placer,
    all: Vec<NodeId>,
}

impl SettingNodes {
    /// Create the nodes, all empty.
    pub(crate) fn new(setting: Setting, trace: &Trace, ranks: &[u64]) -> SettingNodes {
        let mut placer = Placer::new(setting.policy);
        placer.set_pods_end(setting.pods_end);
        let nodes = trace.nodes.iter().zip(ranks);
        let all = nodes.map(|(node, rank)| placer.add(node.shape, node.shape.empty(), *rank));
        let all = all.collect();
        if matches!(setting.policy, Policy::Fgd | Policy::Rf) {
            placer.set_mix(&trace.mix());
        }
        SettingNodes { setting, placer, all }
    }

    /// Place a pod, and return its place. The result is `None` if the pod fits nowhere.
    pub(crate) fn offer(&mut self, demand: &Demand, number: u64) -> Option<Decision> {
        if self.setting.learn_from.is_none_or(|most| number < most) {
            self.placer.arrived(demand);
        }
        let decision = match self.setting.choice {
            NodeChoice::Best => self.placer.decide(demand, number),
            NodeChoice::Lot => self.by_lot(demand, number, |cost, best, _| cost == best),
            NodeChoice::Scores => self.by_lot(demand, number, |cost, best, worst| {
                // This means that 10 * (worst - cost) / (worst - best) is at least 9.5.
                20 * (i128::from(cost) - i128::from(best)) <= i128::from(worst) - i128::from(best)
            }),
        }?;
        self.placer.take(demand, decision).then_some(decision)
    }

    /// Choose a random node among those that are good enough. `good` decides that from the node's cost, the best cost, and the
    /// worst cost.
    fn by_lot(&mut self, demand: &Demand, number: u64, good: impl Fn(i64, i64, i64) -> bool) -> Option<Decision> {
        let costs = self.placer.costs_among(demand, number, &self.all);
        let best = costs
            .iter()
            .flatten()
            .filter(|cost| cost.exact)
            .map(|cost| cost.amount)
            .min()?;
        let worst = costs.iter().flatten().map(|cost| cost.amount).max()?;
        // A guessed cost counts only if it is worse than the best exact one.
        let there =
            self.all.iter().zip(&costs).filter(|(_, cost)| {
                cost.is_some_and(|cost| (cost.exact || cost.amount > best) && good(cost.amount, best, worst))
            });
        let lots: Vec<NodeId> = there.map(|(node, _)| *node).collect();
        let drawn = *lots.get(Random::new(number).below(lots.len()))?;
        self.placer.decide_among(demand, number, &[drawn])
    }
}
