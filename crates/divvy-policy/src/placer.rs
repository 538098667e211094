mod among;
mod costs;
mod rows;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use divvy_placement::hash::mix;

use super::rule::{CostRule, KeptStates, RulePlace};
use super::slots::Slots;
use super::state::StateView;
use super::{CacheLimits, Demand, FreeOnNode, GpuSet, Mix, NodeShape, Policy};
use crate::mixer::Mixer;
pub use among::Cost;
use costs::NO_FIT;
use rows::Rows;

/// The number of a node in a [`Placer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// Return the number as an index. The numbers are small and dense: the number of a removed node is reused.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a pod should go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    /// The number of the chosen node.
    pub node: NodeId,
    /// The chosen GPUs of the node, by position.
    pub gpus: GpuSet,
}

#[derive(Debug)]
struct PlacerNode {
    shape: u32,
    free: FreeOnNode,
    rank: u64,
    slot: u32,
}

/// Chooses nodes and GPUs by a policy, and caches computed costs.
///
/// A decision depends only on the nodes with their ranks, on what is free on them, and on the mix of requests. It does not depend
/// on the order in which these were reported. The work for a change depends only on the changed node. The work for a decision
/// depends on the number of changes since the last decision for the same class of pods.
///
/// # How a decision stays cheap
///
/// - Nodes in the same state (shape, free CPU, free amounts of the GPUs) share a slot (`Slots`), so their cost is computed once.
/// - Each class of pods has a row (`Rows`) with a cost for each slot. The slots keep a log of changes, and `catch_up` applies the
///   changes that the row has not seen yet.
/// - A cost is either exact or a guess: `CostRule::guess` is cheap, but `CostRule::cost` may be expensive. After a change of all prices,
///   the old exact costs become guesses.
/// - `evaluate` replaces guesses with exact costs, the most promising first, until the best known cost is exact and no guess is
///   below it, or until the effort for one decision is spent. Most guesses lie below the exact cost, so a place whose guess is
///   higher than a known cost is rarely the best one. Each decision also replaces a few other guesses in turn, so that no guess
///   stays wrong forever.
#[derive(Debug)]
pub struct Placer {
    policy: Policy,
    rule: Box<dyn CostRule>,
    view: StateView,
    shapes: Vec<NodeShape>,
    shape_numbers: HashMap<NodeShape, u32, BuildHasherDefault<Mixer>>,
    nodes: Vec<Option<PlacerNode>>,
    unused: Vec<u32>,
    slots: Slots,
    rows: Rows,
    /// When there are more shapes than this, the shapes without nodes are dropped.
    most_shapes: usize,
}

/// Up to this number of shapes, a search for unused ones is not worth its time.
const FEW_SHAPES: usize = 256;

/// The number of guesses up to which all are replaced at once.
const FEW: usize = 48;

/// The number of unpromising guesses that each decision examines in turn.
const TURN: usize = 32;

impl Placer {
    /// Create a placer without nodes and without a mix of requests.
    pub fn new(policy: Policy) -> Placer {
        Placer::with_limits(policy, CacheLimits::default())
    }

    /// Create a placer as [`Placer::new`] does, but with the given limits for its caches.
    pub fn with_limits(policy: Policy, limits: CacheLimits) -> Placer {
        let rule = policy.rule(limits);
        Placer {
            policy,
            view: rule.view(),
            rule,
            shapes: Vec::new(),
            shape_numbers: HashMap::default(),
            nodes: Vec::new(),
            unused: Vec::new(),
            slots: Slots::default(),
            rows: Rows::new(limits.costs),
            most_shapes: FEW_SHAPES,
        }
    }

    /// Return the policy.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// Add a node. Among nodes with equal cost, the one with the lowest `rank` is chosen, so each node should have its own rank;
    /// see [`crate::rank`].
    pub fn add(&mut self, shape: NodeShape, free: FreeOnNode, rank: u64) -> NodeId {
        let number = self.shape_number(shape);
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            // No cluster has four billion nodes.
            u32::try_from(self.nodes.len() - 1).unwrap_or(u32::MAX)
        });
        self.rule.joined(number as usize);
        let slot = self.slots.insert(free.state(number, self.view), rank, id);
        self.nodes[id as usize] = Some(PlacerNode {
            shape: number,
            free,
            rank,
            slot,
        });
        NodeId(id)
    }

    /// Remove a node. Its number will be reused.
    pub fn remove(&mut self, node: NodeId) {
        if let Some(gone) = self.nodes.get_mut(node.index()).and_then(Option::take) {
            self.slots.remove(gone.slot, gone.rank, node.0);
            self.rule.left(gone.shape as usize);
            self.unused.push(node.0);
        }
    }

    /// Set what is free on a node, regardless of what was free before.
    pub fn set(&mut self, node: NodeId, free: FreeOnNode) {
        let Some(there) = self.nodes.get_mut(node.index()).and_then(Option::as_mut) else {
            return;
        };
        there.free = free;
        let state = free.state(there.shape, self.view);
        if self.slots.get(there.slot as usize).state.as_ref() != Some(&state) {
            self.slots.remove(there.slot, there.rank, node.0);
            there.slot = self.slots.insert(state, there.rank, node.0);
        }
    }

    /// Set what is free on a node as [`Placer::set`] does, and count the difference as GPU capacity that pods took or released.
    pub fn moved(&mut self, node: NodeId, free: FreeOnNode) {
        let Some((shape, before)) = self.node(node) else { return };
        let sum = |free: &FreeOnNode| free.gpus.iter().map(|left| u64::from(*left)).sum::<u64>();
        let milli = |amount: u64| amount * 1000 / u64::from(shape.gpu_size.max(1));
        let (before, after) = (sum(before), sum(&free));
        let (taken, given_back) = (milli(before.saturating_sub(after)), milli(after.saturating_sub(before)));
        self.set(node, free);
        if taken > 0 {
            self.rule.taken(taken);
        }
        if given_back > 0 {
            self.rule.given_back(given_back);
        }
    }

    /// Return what a node has when it is empty, and what is free on it.
    pub fn node(&self, node: NodeId) -> Option<(&NodeShape, &FreeOnNode)> {
        let there = self.nodes.get(node.index())?.as_ref()?;
        Some((&self.shapes[there.shape as usize], &there.free))
    }

    /// Return all nodes, in the order of their numbers.
    pub fn nodes(&self) -> impl Iterator<Item = (&NodeShape, &FreeOnNode)> {
        let nodes = self.nodes.iter().flatten();
        nodes.map(|node| (&self.shapes[node.shape as usize], &node.free))
    }

    /// Place a pod. If it does not fit there, change nothing and return false.
    pub fn take(&mut self, demand: &Demand, decision: Decision) -> bool {
        let Some((shape, free)) = self.node(decision.node) else {
            return false;
        };
        let (shape, mut free) = (*shape, *free);
        let taken = free.take(&shape, demand, decision.gpus);
        if taken {
            self.rule.taken(demand.milli(&shape));
            self.set(decision.node, free);
        }
        taken
    }

    /// Release what an ended pod had.
    pub fn give_back(&mut self, demand: &Demand, decision: Decision) {
        if let Some((shape, free)) = self.node(decision.node) {
            let (shape, mut free) = (*shape, *free);
            free.give_back(&shape, demand, decision.gpus);
            self.rule.given_back(demand.milli(&shape));
            self.set(decision.node, free);
        }
    }

    /// Set the mix of requests, and forget the previous one.
    pub fn set_mix(&mut self, mix: &Mix) {
        self.rule.set_mix(mix, &self.shapes);
    }

    /// Set by hand whether pods end and their capacity is used again, or whether the cluster only fills up. With `None`, the
    /// default, a policy that distinguishes the two cases compares how much GPU capacity is released with how much is taken.
    pub fn set_pods_end(&mut self, said: Option<bool>) {
        self.rule.set_pods_end(said);
    }

    /// Report the arrival of a pod to policies that learn. Call this once for each pod, before the decision about it.
    pub fn arrived(&mut self, demand: &Demand) {
        self.rule.arrived(&demand.class());
    }

    /// Let the policy read the current states of all nodes. Policies with prices do this automatically after a number of
    /// arrivals.
    pub fn refresh(&mut self) {
        self.rule.states(&mut self.slots.states());
    }

    /// If reading the states of all nodes is due, do so now. This saves the next decision that work.
    pub fn prepare(&mut self) {
        if self.rule.wants_states() {
            self.refresh();
        }
    }

    /// Drop the shapes that no node has any longer, once they outnumber the others. A node could publish a new shape every
    /// second, so the number of shapes must be bounded.
    pub fn forget_unused_shapes(&mut self) {
        if self.shapes.len() <= self.most_shapes {
            return;
        }
        let mut counts = vec![0; self.shapes.len()];
        for node in self.nodes.iter().flatten() {
            counts[node.shape as usize] += 1;
        }
        let used = counts.iter().filter(|count| **count > 0).count();
        self.most_shapes = FEW_SHAPES.max(2 * used);
        if self.shapes.len() <= self.most_shapes {
            return;
        }
        let mut numbers = vec![0; self.shapes.len()];
        let mut shapes: Vec<(NodeShape, u64)> = Vec::with_capacity(used);
        for (number, count) in counts.into_iter().enumerate().filter(|(_, count)| *count > 0) {
            numbers[number] = u32::try_from(shapes.len()).unwrap_or(u32::MAX);
            shapes.push((self.shapes[number], count));
        }
        self.shapes = shapes.iter().map(|(shape, _)| *shape).collect();
        self.shape_numbers = self.shapes.iter().copied().zip(0..).collect();
        self.slots = Slots::default();
        self.rows = self.rows.emptied();
        for (id, node) in self.nodes.iter_mut().enumerate() {
            if let Some(node) = node {
                node.shape = numbers[node.shape as usize];
                let id = u32::try_from(id).unwrap_or(u32::MAX);
                node.slot = self.slots.insert(node.free.state(node.shape, self.view), node.rank, id);
            }
        }
        self.rule.set_shapes(&shapes);
    }

    /// Choose the best place for a pod. The result is `None` if it fits nowhere. `pod` is a number that identifies the pod; only
    /// the policy `random` uses it.
    pub fn decide(&mut self, demand: &Demand, pod: u64) -> Option<Decision> {
        if self.policy == Policy::Random {
            return self.decide_randomly(demand, pod);
        }
        self.prepare();
        let class = demand.class();
        let row = self.rows.of(&class, self.slots.len());
        self.catch_up(row, &class);
        self.evaluate(row, &class);
        let node = self.least(row, demand).or_else(|| {
            // All nodes with a known cost lack main memory, which is not part of a node's state.
            self.evaluate_all(row, &class);
            self.least(row, demand)
        })?;
        let gpus = self.gpus(node, &class)?;
        Some(Decision { node, gpus })
    }

    fn shape_number(&mut self, shape: NodeShape) -> u32 {
        if let Some(number) = self.shape_numbers.get(&shape) {
            return *number;
        }
        let number = u32::try_from(self.shapes.len()).unwrap_or(u32::MAX);
        self.shapes.push(shape);
        self.shape_numbers.insert(shape, number);
        self.rule.add_shape(&shape);
        number
    }

    /// Bring a row up to date with the changes since the last decision for its class.
    fn catch_up(&mut self, number: usize, class: &Demand) {
        let row = &mut self.rows[number];
        for shape in &self.shapes[row.amounts.len()..] {
            row.amounts.push(class.amount(shape));
        }
        let slots = self.slots.len();
        row.exact.grow(slots);
        row.guessed.grow(slots);
        row.versions.resize(slots, 0);
        row.kept.resize(slots, KeptStates::default());
        if row.epoch != self.rule.epoch() {
            row.epoch = self.rule.epoch();
            // A cost that was exact before is a good guess.
            row.guesses += row.guessed.take_from(&mut row.exact);
        }
        let mut look = |slot: usize| {
            let there = self.slots.get(slot);
            if row.versions[slot] == there.version {
                return;
            }
            row.versions[slot] = there.version;
            row.kept[slot] = KeptStates::default();
            row.exact.set(slot, NO_FIT);
            row.guesses -= usize::from(row.guessed.set(slot, NO_FIT) != NO_FIT);
            let Some(state) = &there.state else { return };
            let Some(amount) = row.amounts[state.shape as usize] else {
                return;
            };
            if state.fits(class, amount) {
                let guess = self.rule.guess(&RulePlace {
                    demand: class,
                    amount,
                    shape: &self.shapes[state.shape as usize],
                    state,
                    noted: &there.noted,
                });
                row.guessed.set(slot, guess);
                row.guesses += 1;
            }
        };
        match self.slots.changed_since(row.changes) {
            Some(changed) if changed.len() < slots => changed.iter().for_each(|slot| look(*slot as usize)),
            _ => (0..slots).for_each(look),
        }
        row.changes = self.slots.changes();
    }

    /// Replace guesses with exact costs. If there are few guesses, replace all of them. Otherwise, replace the most promising
    /// ones until the best cost is exact, and a few others in turn.
    fn evaluate(&mut self, number: usize, class: &Demand) {
        if self.rows[number].guesses <= FEW || !self.rule.is_dear() {
            self.evaluate_all(number, class);
            return;
        }
        let (promising, in_turn) = self.rule.effort();
        let until = self.rule.work() + promising;
        let mut best = self.rows[number].exact.least();
        loop {
            let guessed = &self.rows[number].guessed;
            let least = guessed.least();
            if least == NO_FIT || least > best || (best != NO_FIT && self.rule.work() >= until) {
                break;
            }
            let Some(slot) = guessed.with(least).next() else {
                break;
            };
            best = best.min(self.evaluate_one(number, class, slot));
        }
        self.evaluate_in_turn(number, class, in_turn);
    }

    /// Replace a few guesses that do not look promising.
    fn evaluate_in_turn(&mut self, number: usize, class: &Demand, work: u64) {
        let until = self.rule.work() + work;
        let slots = self.rows[number].guessed.len();
        for _ in 0..TURN {
            if self.rule.work() >= until {
                break;
            }
            let row = &mut self.rows[number];
            match row.guessed.known_from(row.cursor) {
                Some(slot) => {
                    row.cursor = (slot + 1) % slots;
                    self.evaluate_one(number, class, slot);
                }
                None => row.cursor = 0,
            }
        }
    }

    fn evaluate_all(&mut self, number: usize, class: &Demand) {
        if self.rows[number].guesses == 0 {
            return;
        }
        for slot in 0..self.rows[number].guessed.len() {
            if self.rows[number].guessed.get(slot) != NO_FIT {
                self.evaluate_one(number, class, slot);
            }
        }
    }

    fn evaluate_one(&mut self, number: usize, class: &Demand, slot: usize) -> i64 {
        let row = &mut self.rows[number];
        row.guesses -= 1;
        row.guessed.set(slot, NO_FIT);
        let there = self.slots.get(slot);
        let Some(state) = &there.state else {
            return NO_FIT;
        };
        let Some(amount) = row.amounts[state.shape as usize] else {
            return NO_FIT;
        };
        let place = RulePlace {
            demand: class,
            amount,
            shape: &self.shapes[state.shape as usize],
            state,
            noted: &there.noted,
        };
        let cost = self.rule.cost(&place, &mut row.kept[slot]);
        row.exact.set(slot, cost);
        cost
    }

    /// Return the node with the least cost that has enough main memory; on a tie, the one with the lowest rank.
    fn least(&self, row: usize, demand: &Demand) -> Option<NodeId> {
        let costs = &self.rows[row].exact;
        let enough = |(_, node): &(u64, u32)| {
            let there = self.nodes[*node as usize].as_ref();
            there.is_some_and(|there| there.free.memory_mib >= demand.memory_mib)
        };
        let best_of = |slot: usize| self.slots.get(slot).nodes().find(enough);
        let least = Some(costs.least()).filter(|cost| *cost != NO_FIT)?;
        let best = costs.with(least).filter_map(best_of).min().or_else(|| {
            // All of the best nodes lack main memory.
            let best = costs.known().filter_map(|(slot, cost)| Some((cost, best_of(slot)?))).min()?;
            Some(best.1)
        });
        best.map(|(_, node)| NodeId(node))
    }

    fn gpus(&mut self, node: NodeId, class: &Demand) -> Option<GpuSet> {
        let there = self.nodes.get(node.index())?.as_ref()?;
        let shape = &self.shapes[there.shape as usize];
        let amount = class.amount(shape)?;
        let mut level = None;
        if class.is_part(shape, amount) {
            let slot = self.slots.get(there.slot as usize);
            level = self.rule.level(&RulePlace {
                demand: class,
                amount,
                shape,
                state: slot.state.as_ref()?,
                noted: &slot.noted,
            });
        }
        there.free.gpus_for(class, amount, level)
    }

    /// Choose a node at random among those where the pod fits, then a GPU at random among those that have room. All have the same
    /// chance.
    fn decide_randomly(&self, demand: &Demand, pod: u64) -> Option<Decision> {
        let fitting = self
            .nodes
            .iter()
            .enumerate()
            .filter_map(|(id, node)| Some((id, node.as_ref()?)));
        let fitting = fitting.filter(|(_, node)| node.free.fits(&self.shapes[node.shape as usize], demand));
        let (id, _) = fitting.min_by_key(|(_, node)| mix(node.rank ^ mix(pod)))?;
        let node = NodeId(u32::try_from(id).ok()?);
        let gpus = self.random_gpus(node, demand, pod)?;
        Some(Decision { node, gpus })
    }

    fn random_gpus(&self, node: NodeId, demand: &Demand, pod: u64) -> Option<GpuSet> {
        let (shape, free) = self.node(node)?;
        let amount = demand.amount(shape)?;
        if demand.gpus != 1 {
            return free.gpus_for(demand, amount, None);
        }
        let positions = (0..usize::from(shape.gpus)).filter(|position| free.gpus[*position] >= amount);
        let position = positions.min_by_key(|position| mix(pod ^ mix(*position as u64)))?;
        Some(GpuSet(1 << position))
    }
}
