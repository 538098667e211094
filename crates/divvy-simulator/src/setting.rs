use divvy_policy::{Decision, Demand, NodeId, Placer, Policy};

use crate::Trace;
use crate::random::Random;

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
    /// How the policy's opinion becomes a node.
    pub choice: Choice,
}

/// How a policy's opinion of nodes becomes one of them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Choice {
    /// The best one, of equals the one with the lowest rank.
    #[default]
    Best,
    /// Of those that cost the least one by lot, as kube-scheduler draws among equal scores.
    Lot,
    /// Costs are squeezed to whole scores from 0 for the worst to 10 for the best first, rounded to the nearest: then one of those with
    /// 10 by lot. What a scheduler extender would do that gives the best node no more than those that are nearly as good.
    Scores,
}

impl From<Policy> for Setting {
    /// It learns from all, nothing is said to it, fragmentation is not measured, the best node is taken.
    fn from(policy: Policy) -> Setting {
        Setting {
            policy,
            learn_from: None,
            pods_end: None,
            fragments: false,
            choice: Choice::Best,
        }
    }
}

/// The nodes of a trace under a setting.
#[derive(Debug)]
pub(crate) struct Nodes {
    setting: Setting,
    pub(crate) placer: Placer,
    all: Vec<NodeId>,
}

impl Nodes {
    /// All of them, empty.
    pub(crate) fn new(setting: Setting, trace: &Trace, ranks: &[u64]) -> Nodes {
        let mut placer = Placer::new(setting.policy);
        placer.say_whether_pods_end(setting.pods_end);
        let nodes = trace.nodes.iter().zip(ranks);
        let all = nodes.map(|(node, rank)| placer.add(node.shape, node.shape.empty(), *rank));
        let all = all.collect();
        if matches!(setting.policy, Policy::Fgd | Policy::Rf) {
            placer.set_mix(&trace.mix());
        }
        Nodes { setting, placer, all }
    }

    /// Offers a pod; `None` if it fits nowhere.
    pub(crate) fn offer(&mut self, demand: &Demand, number: u64) -> Option<Decision> {
        if self.setting.learn_from.is_none_or(|most| number < most) {
            self.placer.arrived(demand);
        }
        let decision = match self.setting.choice {
            Choice::Best => self.placer.decide(demand, number),
            Choice::Lot => self.by_lot(demand, number, |cost, best, _| cost == best),
            Choice::Scores => self.by_lot(demand, number, |cost, best, worst| {
                // 10 * (worst - cost) / (worst - best) is at least 9.5.
                20 * (i128::from(cost) - i128::from(best)) <= i128::from(worst) - i128::from(best)
            }),
        }?;
        self.placer.take(demand, decision).then_some(decision)
    }

    /// One of the nodes that are good enough, given their cost, the best one's and the worst one's.
    fn by_lot(&mut self, demand: &Demand, number: u64, good: impl Fn(i64, i64, i64) -> bool) -> Option<Decision> {
        let costs = self.placer.costs_among(demand, number, &self.all);
        let best = costs
            .iter()
            .flatten()
            .filter(|cost| cost.exact)
            .map(|cost| cost.amount)
            .min()?;
        let worst = costs.iter().flatten().map(|cost| cost.amount).max()?;
        // What was not worth the time to find out is no better than the best.
        let there =
            self.all.iter().zip(&costs).filter(|(_, cost)| {
                cost.is_some_and(|cost| (cost.exact || cost.amount > best) && good(cost.amount, best, worst))
            });
        let lots: Vec<NodeId> = there.map(|(node, _)| *node).collect();
        let drawn = *lots.get(Random::new(number).below(lots.len()))?;
        self.placer.decide_among(demand, number, &[drawn])
    }
}
