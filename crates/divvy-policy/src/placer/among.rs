//! Decisions among a given set of nodes. kube-scheduler asks the extender only about nodes that have passed its own filters.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::super::rule::RulePlace;
use super::super::{CostTerm, Demand, Policy};
use super::{Decision, FEW, NO_FIT, NodeId, Placer};
use divvy_placement::hash::mix;

/// The cost of a pod on a node; lower is better. Only costs for the same pod can be compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// The amount, in the policy's own unit.
    pub amount: i64,
    /// Whether the amount is exact. If not, it is a guess: other nodes looked better, so the exact cost was not computed.
    pub exact: bool,
}

impl Placer {
    /// Return the cost of the pod on each of these nodes, in the same order; `None` for a node where it does not fit. If the pod
    /// fits any of them, at least one cost is exact. `pod` is as in [`Placer::decide`].
    pub fn costs_among(&mut self, demand: &Demand, pod: u64, among: &[NodeId]) -> Vec<Option<Cost>> {
        if self.policy == Policy::Random {
            return among.iter().map(|id| self.random_cost(*id, demand, pod)).collect();
        }
        self.prepare();
        let class = demand.class();
        let row = self.rows.of(&class, self.slots.len());
        self.catch_up(row, &class);
        let slots: Vec<Option<u32>> = among.iter().map(|id| self.slot_with_memory(*id, demand)).collect();
        self.evaluate_among(row, &class, &slots);
        let costs = &self.rows[row];
        let cost = |slot: Option<u32>| {
            let slot = slot? as usize;
            match (costs.exact.get(slot), costs.guessed.get(slot)) {
                (NO_FIT, NO_FIT) => None,
                (NO_FIT, amount) => Some(Cost { amount, exact: false }),
                (amount, _) => Some(Cost { amount, exact: true }),
            }
        };
        slots.into_iter().map(cost).collect()
    }

    /// Return the position of the best of these nodes, given the costs that [`Placer::costs_among`] returned for them: the node
    /// with the lowest exact cost; on a tie, the one with the lowest rank.
    pub fn best_of(&self, among: &[NodeId], costs: &[Option<Cost>]) -> Option<usize> {
        let known = among.iter().zip(costs).enumerate();
        let exact = known.filter_map(|(at, (id, cost))| {
            let rank = self.nodes.get(id.index())?.as_ref()?.rank;
            let amount = (*cost).filter(|cost| cost.exact)?.amount;
            Some((amount, rank, at))
        });
        exact.min().map(|(_, _, at)| at)
    }

    /// Choose the best place as [`Placer::decide`] does, but only among these nodes.
    pub fn decide_among(&mut self, demand: &Demand, pod: u64, among: &[NodeId]) -> Option<Decision> {
        let costs = self.costs_among(demand, pod, among);
        let node = *among.get(self.best_of(among, &costs)?)?;
        let gpus = match self.policy {
            Policy::Random => self.random_gpus(node, demand, pod),
            _ => self.gpus(node, &demand.class()),
        }?;
        Some(Decision { node, gpus })
    }

    /// Return the terms of the pod's cost on a node. The list is empty if the policy's cost is a single number, or if the pod
    /// does not fit.
    pub fn terms(&mut self, demand: &Demand, node: NodeId) -> Vec<CostTerm> {
        let class = demand.class();
        let Some(there) = self.nodes.get(node.index()).and_then(Option::as_ref) else {
            return Vec::new();
        };
        let shape = &self.shapes[there.shape as usize];
        let slot = self.slots.get(there.slot as usize);
        let (Some(amount), Some(state)) = (class.amount(shape), &slot.state) else {
            return Vec::new();
        };
        if !there.free.fits(shape, demand) {
            return Vec::new();
        }
        self.rule.terms(&RulePlace {
            demand: &class,
            amount,
            shape,
            state,
            noted: &slot.noted,
        })
    }

    /// Return the slot of a node, or `None` if the node has too little main memory for the pod.
    fn slot_with_memory(&self, id: NodeId, demand: &Demand) -> Option<u32> {
        let node = self.nodes.get(id.index())?.as_ref()?;
        (node.free.memory_mib >= demand.memory_mib).then_some(node.slot)
    }

    fn random_cost(&self, id: NodeId, demand: &Demand, pod: u64) -> Option<Cost> {
        let node = self.nodes.get(id.index())?.as_ref()?;
        let fits = node.free.fits(&self.shapes[node.shape as usize], demand);
        let amount = i64::try_from(mix(node.rank ^ mix(pod)) >> 1).unwrap_or(i64::MAX);
        fits.then_some(Cost { amount, exact: true })
    }

    /// Replace guesses with exact costs as `evaluate` does, but only for these slots.
    fn evaluate_among(&mut self, number: usize, class: &Demand, slots: &[Option<u32>]) {
        if self.rows[number].guesses == 0 {
            return;
        }
        let slots = slots.iter().flatten().map(|slot| *slot as usize);
        let row = &self.rows[number];
        let mut best = NO_FIT;
        let mut guesses: Vec<Reverse<(i64, usize)>> = Vec::with_capacity(row.guesses);
        // Nodes in the same state share a slot.
        let mut seen = vec![false; row.guessed.len()];
        for slot in slots.filter(|slot| !std::mem::replace(&mut seen[*slot], true)) {
            best = best.min(row.exact.get(slot));
            let guess = row.guessed.get(slot);
            if guess != NO_FIT {
                guesses.push(Reverse((guess, slot)));
            }
        }
        // Of thousands of guesses, only the least few are needed: a heap is cheaper than sorting.
        let mut guesses = BinaryHeap::from(guesses);
        let all = guesses.len() <= FEW || !self.rule.is_dear();
        let (promising, in_turn) = self.rule.effort();
        let until = self.rule.work() + promising;
        while let Some(Reverse((guess, slot))) = guesses.pop() {
            if !all && (guess > best || (best != NO_FIT && self.rule.work() >= until)) {
                break;
            }
            best = best.min(self.evaluate_one(number, class, slot));
        }
        if !all {
            self.evaluate_in_turn(number, class, in_turn);
        }
    }
}
