mod among;
mod costs;
mod rows;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use divvy_placement::hash::mix;

use super::rule::{Kept, Place, Rule};
use super::slots::Slots;
use super::state::View;
use super::{Demand, Free, GpuSet, Limits, Mix, Policy, Shape};
use crate::mixer::Mixer;
pub use among::Cost;
use costs::NO_FIT;
use rows::Rows;

/// A node of a [`Placer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    /// Small and dense: the numbers of removed nodes are given again.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Where a pod is to go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Decision {
    /// The node.
    pub node: NodeId,
    /// Its GPUs, by position.
    pub gpus: GpuSet,
}

#[derive(Debug)]
struct Node {
    shape: u32,
    free: Free,
    rank: u64,
    slot: u32,
}

/// Chooses nodes and GPUs by a policy, and remembers what it has found out.
///
/// What it answers depends on the nodes with their ranks, on what they have left and on the mix; not on the order in which all that was
/// told. Changes cost what the changed node costs; a decision costs what has changed since the last one for the same class of pods.
#[derive(Debug)]
pub struct Placer {
    policy: Policy,
    rule: Box<dyn Rule>,
    view: View,
    shapes: Vec<Shape>,
    shape_numbers: HashMap<Shape, u32, BuildHasherDefault<Mixer>>,
    nodes: Vec<Option<Node>>,
    unused: Vec<u32>,
    slots: Slots,
    rows: Rows,
    /// When there are so many shapes, those that no node has any more are forgotten.
    most_shapes: usize,
}

/// So few shapes are not worth a look at which of them are in use.
const FEW_SHAPES: usize = 256;

/// So few guesses are replaced at once.
const FEW: usize = 48;

/// Guesses that are looked at in each decision though they do not look promising.
const TURN: usize = 32;

impl Placer {
    /// No node yet, and nothing known of what pods ask for.
    pub fn new(policy: Policy) -> Placer {
        Placer::with_limits(policy, Limits::default())
    }

    /// As [`Placer::new`], and remembers no more than this.
    pub fn with_limits(policy: Policy, limits: Limits) -> Placer {
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

    /// The policy that it chooses by.
    pub fn policy(&self) -> Policy {
        self.policy
    }

    /// A node comes. `rank`: of nodes that are worth the same the one with the lowest is chosen, so no two should have the same;
    /// see [`crate::rank`].
    pub fn add(&mut self, shape: Shape, free: Free, rank: u64) -> NodeId {
        let number = self.shape_number(shape);
        let id = self.unused.pop().unwrap_or_else(|| {
            self.nodes.push(None);
            // No cluster has four thousand million nodes.
            u32::try_from(self.nodes.len() - 1).unwrap_or(u32::MAX)
        });
        self.rule.joined(number as usize);
        let slot = self.slots.insert(free.state(number, self.view), rank, id);
        self.nodes[id as usize] = Some(Node {
            shape: number,
            free,
            rank,
            slot,
        });
        NodeId(id)
    }

    /// A node goes. Its number is given again.
    pub fn remove(&mut self, node: NodeId) {
        if let Some(gone) = self.nodes.get_mut(node.index()).and_then(Option::take) {
            self.slots.remove(gone.slot, gone.rank, node.0);
            self.rule.left(gone.shape as usize);
            self.unused.push(node.0);
        }
    }

    /// A node has this left now, whatever it had before.
    pub fn set(&mut self, node: NodeId, free: Free) {
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

    /// As [`Placer::set`], and the difference was taken by pods, or given back by them.
    pub fn moved(&mut self, node: NodeId, free: Free) {
        let Some((shape, before)) = self.node(node) else { return };
        let sum = |free: &Free| free.gpus.iter().map(|left| u64::from(*left)).sum::<u64>();
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

    /// What a node has when it is empty, and what it has left.
    pub fn node(&self, node: NodeId) -> Option<(&Shape, &Free)> {
        let there = self.nodes.get(node.index())?.as_ref()?;
        Some((&self.shapes[there.shape as usize], &there.free))
    }

    /// All nodes, in the order of their numbers.
    pub fn nodes(&self) -> impl Iterator<Item = (&Shape, &Free)> {
        let nodes = self.nodes.iter().flatten();
        nodes.map(|node| (&self.shapes[node.shape as usize], &node.free))
    }

    /// A pod starts there. False, and nothing changes, if it does not fit.
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

    /// A pod that was there has ended.
    pub fn give_back(&mut self, demand: &Demand, decision: Decision) {
        if let Some((shape, free)) = self.node(decision.node) {
            let (shape, mut free) = (*shape, *free);
            free.give_back(&shape, demand, decision.gpus);
            self.rule.given_back(demand.milli(&shape));
            self.set(decision.node, free);
        }
    }

    /// This is what pods ask for, as far as anybody knows; whatever was known before is forgotten.
    pub fn set_mix(&mut self, mix: &Mix) {
        self.rule.set_mix(mix, &self.shapes);
    }

    /// Whether pods end and their room is used again, or the cluster only fills up. `None`, as it is at first: a policy that cares sees for
    /// itself, from how much GPU is given back for how much is taken.
    pub fn say_whether_pods_end(&mut self, said: Option<bool>) {
        self.rule.say_whether_pods_end(said);
    }

    /// A pod came, which a policy that learns may learn from. To be told once of each pod, before it is decided on.
    pub fn arrived(&mut self, demand: &Demand) {
        self.rule.arrived(&demand.class());
    }

    /// Looks at how the nodes stand now. Policies with prices do so by themselves every so many arrivals.
    pub fn refresh(&mut self) {
        self.rule.states(&mut self.slots.states());
    }

    /// Does now what the next decision would have to wait for: the look at how the nodes stand, if it is due.
    pub fn prepare(&mut self) {
        if self.rule.wants_states() {
            self.refresh();
        }
    }

    /// Forgets the shapes that no node has any more, once they are more than the others. A node can publish another shape every second.
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
        let mut shapes: Vec<(Shape, u64)> = Vec::with_capacity(used);
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

    /// The best place for a pod; `None` if it fits nowhere. `pod`: any number of its own; only the policy `random` looks at it.
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
            // Main memory is short on all nodes whose costs are known.
            self.evaluate_all(row, &class);
            self.least(row, demand)
        })?;
        let gpus = self.gpus(node, &class)?;
        Some(Decision { node, gpus })
    }

    fn shape_number(&mut self, shape: Shape) -> u32 {
        if let Some(number) = self.shape_numbers.get(&shape) {
            return *number;
        }
        let number = u32::try_from(self.shapes.len()).unwrap_or(u32::MAX);
        self.shapes.push(shape);
        self.shape_numbers.insert(shape, number);
        self.rule.add_shape(&shape);
        number
    }

    /// Takes in what has changed since this class was last asked for.
    fn catch_up(&mut self, number: usize, class: &Demand) {
        let row = &mut self.rows[number];
        for shape in &self.shapes[row.amounts.len()..] {
            row.amounts.push(class.amount(shape));
        }
        let slots = self.slots.len();
        row.exact.grow(slots);
        row.guessed.grow(slots);
        row.versions.resize(slots, 0);
        row.kept.resize(slots, Kept::default());
        if row.epoch != self.rule.epoch() {
            row.epoch = self.rule.epoch();
            // What was right is a good guess.
            row.guesses += row.guessed.take_from(&mut row.exact);
        }
        let mut look = |slot: usize| {
            let there = self.slots.get(slot);
            if row.versions[slot] == there.version {
                return;
            }
            row.versions[slot] = there.version;
            row.kept[slot] = Kept::default();
            row.exact.set(slot, NO_FIT);
            row.guesses -= usize::from(row.guessed.set(slot, NO_FIT) != NO_FIT);
            let Some(state) = &there.state else { return };
            let Some(amount) = row.amounts[state.shape as usize] else {
                return;
            };
            if state.fits(class, amount) {
                let guess = self.rule.guess(&Place {
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

    /// Replaces guesses by what is right: all if they are few; else the most promising until the best is right, and a few others in turn.
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

    /// Replaces a few guesses that do not look promising.
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
        let place = Place {
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

    /// Of the nodes with memory enough the one with the least cost, of equals the one with the lowest rank.
    fn least(&self, row: usize, demand: &Demand) -> Option<NodeId> {
        let costs = &self.rows[row].exact;
        let enough = |(_, node): &(u64, u32)| {
            let there = self.nodes[*node as usize].as_ref();
            there.is_some_and(|there| there.free.memory_mib >= demand.memory_mib)
        };
        let best_of = |slot: usize| self.slots.get(slot).nodes().find(enough);
        let least = Some(costs.least()).filter(|cost| *cost != NO_FIT)?;
        let best = costs.with(least).filter_map(best_of).min().or_else(|| {
            // Memory is short on all of the best.
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
            level = self.rule.level(&Place {
                demand: class,
                amount,
                shape,
                state: slot.state.as_ref()?,
                noted: &slot.noted,
            });
        }
        there.free.gpus_for(class, amount, level)
    }

    /// Every node that fits, and every GPU there that does, with the same chance.
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
