//! Divvy's own policy: it puts a pod where it makes the least GPU capacity useless for the pods that usually follow.
//!
//! All amounts here are in thousandths of a GPU ("milli"), stored as multiples of a millionth of that unit ([`MICRO`]). Lower
//! costs are better, and a negative cost is a gain. The cost of a placement is the sum of three terms:
//!
//! 1. **Stranding** ([`sequences`]): how much more of the node's free GPU capacity ends up unusable. The usual pods are offered
//!    to the node, one after another, until none fits; what is still free then is stranded.
//! 2. **Scarcity** ([`mixture::scarcity`]): half the price of the GPU's product, times what the pod takes. The price is high if
//!    pods that can use no other product ask for much of this one.
//! 3. **Slot pressure** ([`pressure`]): the value of the places that the placement takes away from pods with several GPUs and
//!    from pods that may use only some products.
//!
//! # Example
//!
//! A node has two GPUs and plenty of CPU. GPU 0 has 900 free, and GPU 1 has 500. All pods that the policy has learned from took
//! 500 of one GPU. Now a pod arrives that requests 300.
//!
//! ```text
//!            free now         pod on GPU 0       pod on GPU 1
//! GPU 0      900  #.........  600  ####......    900  #.........
//! GPU 1      500  #####....   500  #####.....    200  ########..
//! stranded   400              100                600
//! ```
//!
//! - Before the placement, the usual pods would take 500 of GPU 1 and 500 of GPU 0 (the fullest GPU that fits comes first). 400
//!   of GPU 0 stay stranded.
//! - With the pod on GPU 0, they would take 500 of each GPU. 100 of GPU 0 stay stranded, which is 300 less: the stranding is
//!   -300.
//! - With the pod on GPU 1, they would take 500 of GPU 0 only. 400 of GPU 0 and 200 of GPU 1 stay stranded, which is 200 more:
//!   the stranding is 200.
//! - If the cluster has one kind of node, every pod can use every GPU, and the price of the product is 1. The scarcity is half of
//!   300 on both GPUs: 150.
//! - The slot pressure is 0. The only places that matter here are those for a pod with two whole GPUs. This node has no such
//!   place, before or after the placement.
//!
//! So GPU 0 costs -300 + 150 = -150, and GPU 1 costs 200 + 150 = 350. GPU 0 wins, although `best-fit` would fill GPU 1. The
//! node's cost is the cost of its best GPU. Costs are compared in steps of 10 ([`STEP`]), so this node costs -15 steps.
//!
//! # Two settings
//!
//! While no pods end, a cluster only fills up, and every mistake is permanent. Slot pressure counts half, and its prices are
//! squared, so that places are nearly free until they become rare.
//!
//! Once pods end ([`turnover`]), capacity is used again and again, and capacity that cannot be used right now matters as well.
//! Then stranding counts for three tenths; FGD's fragments and a tenth of the unplaced capacity are added ([`waste`]); and slot
//! pressure counts in full, with prices that are not squared.
//!
//! `docs/design/placement.md` describes the policy and its results.

pub(super) mod mixture;
mod pressure;
mod sequences;
mod turnover;
mod waste;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::rule::{CostRule, KeptStates, Noted, RulePlace};
use super::state::PolicyNodeState;
use super::{CacheLimits, CostTerm, Demand, Mix, NodeShape};
use crate::mixer::Mixer;
use mixture::Mixture;
pub(super) use mixture::scarcity;
pub(super) use pressure::MICRO;
use pressure::{Pressure, Rise};
use sequences::{Draw, SEQUENCES, Sequences};
use turnover::TurnoverDetector;
pub(super) use waste::{Waste, micro};

/// The step in which costs are compared: 10 thousandths of a GPU. Smaller differences are noise from the random sequences.
const STEP: i64 = 10 * MICRO;

#[derive(Debug)]
pub(crate) struct Divvy {
    mixture: Mixture,
    classes: Vec<(Demand, u64)>,
    draw: Option<Draw>,
    /// Each shape, and the number of nodes that have it.
    shapes: Vec<(NodeShape, u64)>,
    /// By shape number: the index of the shape's entry in `sequences` and in `waste`. Shapes for which the scaled pods are the
    /// same share one entry.
    sequence_of: Vec<usize>,
    sequences: Vec<Sequences>,
    waste: Vec<Waste>,
    turnover: TurnoverDetector,
    scarcity: Vec<i64>,
    pressure: Pressure,
    states: KnownStates,
    /// The number of arrivals until the prices of places are computed again.
    until_refresh: u64,
    nodes: u64,
    idle_milli: u64,
    /// Whether scarcity and pressure must be computed again, because the nodes or the mix have changed.
    reprice: bool,
    /// Incremented when all costs change, because the prices or the mix are new.
    epoch: u32,
    /// Incremented when the numbers of states change, because the table of states was cleared.
    generation: u32,
    /// The number of states evaluated so far, as a measure of work.
    work: u64,
    limits: CacheLimits,
    /// Whether only a few pods have been seen ([`Mixture::is_young`]).
    young: bool,
}

/// What is known about node states. Each state is numbered by its index in `states`.
#[derive(Debug, Default)]
struct KnownStates {
    numbers: HashMap<PolicyNodeState, u32, BuildHasherDefault<Mixer>>,
    states: Vec<Worth>,
}

#[derive(Debug)]
struct Worth {
    state: PolicyNodeState,
    /// The part of the state's cost that does not depend on prices (stranding, and waste if pods end), in millionths of a
    /// thousandth of a GPU.
    idle: i64,
    /// The value of the state's places, computed in `epoch`.
    places: i64,
    epoch: u32,
}

impl Divvy {
    pub(crate) fn new(limits: CacheLimits) -> Divvy {
        Divvy {
            mixture: Mixture::of_at_most(limits.classes),
            classes: Vec::new(),
            draw: None,
            shapes: Vec::new(),
            sequence_of: Vec::new(),
            sequences: Vec::new(),
            waste: Vec::new(),
            turnover: TurnoverDetector::default(),
            scarcity: Vec::new(),
            pressure: Pressure::default(),
            states: KnownStates::default(),
            until_refresh: 0,
            nodes: 0,
            idle_milli: 0,
            reprice: true,
            epoch: 1,
            generation: 1,
            work: 0,
            limits,
            young: true,
        }
    }

    /// Use the mix that was learned so far from now on, and drop everything that depends on the previous one.
    fn fit(&mut self) {
        self.classes = self.mixture.fit();
        self.young = self.mixture.is_young();
        // A pod without a GPU can strand GPU capacity only by taking CPU. Counting such pods at half their frequency predicted
        // best: weights of 0, 0.25, 0.75, and 1 were all worse in simulations of openb.
        let weights: Vec<u64> = self
            .classes
            .iter()
            .map(|(class, weight)| if class.gpus == 0 { *weight } else { 2 * *weight })
            .collect();
        self.draw = (!weights.is_empty()).then(|| Draw::new(&weights));
        self.sequences.clear();
        self.sequence_of.clear();
        self.waste.clear();
        for number in 0..self.shapes.len() {
            self.add_sequences(number);
        }
        self.forget_states();
        self.inventory_changed();
    }

    /// Request that scarcity and pressure, which depend on the nodes, are computed again.
    fn inventory_changed(&mut self) {
        (self.reprice, self.until_refresh) = (true, 0);
    }

    fn add_sequences(&mut self, number: usize) {
        let Some(draw) = &self.draw else { return };
        let (shape, _) = self.shapes[number];
        let like = |other: &(NodeShape, u64)| Sequences::same(&other.0, &shape);
        let own = match self.shapes[..number].iter().position(like) {
            Some(same) => self.sequence_of[same],
            None => {
                let classes: Vec<Demand> = self.classes.iter().map(|(class, _)| *class).collect();
                self.sequences.push(Sequences::new(draw, &classes, &shape));
                self.waste.push(Waste::new(&self.classes, &shape));
                self.sequences.len() - 1
            }
        };
        self.sequence_of.push(own);
    }

    fn forget_states(&mut self) {
        self.states.numbers.clear();
        self.states.states.clear();
        self.generation += 1;
        self.epoch += 1;
    }

    /// Return the number of a state, after computing everything about the state that does not depend on prices.
    fn know(&mut self, state: &PolicyNodeState) -> u32 {
        if let Some(number) = self.states.numbers.get(state) {
            return *number;
        }
        self.work += 1;
        let (shape, _) = &self.shapes[state.shape as usize];
        let idle = match self.sequence_of.get(state.shape as usize) {
            Some(own) => {
                let milli = i64::try_from(self.sequences[*own].stranded(state)).unwrap_or(i64::MAX);
                let stranded = milli.saturating_mul(MICRO / SEQUENCES as i64);
                if self.turnover.pods_end() {
                    stranded * 3 / 10 + self.waste[*own].amount(state, shape)
                } else {
                    stranded
                }
            }
            // Nothing has been learned yet: all that is free counts as stranded.
            None => {
                let milli = state.total() * 1000 / u64::from(shape.gpu_size.max(1));
                i64::try_from(milli).unwrap_or(i64::MAX).saturating_mul(MICRO)
            }
        };
        let number = u32::try_from(self.states.states.len()).unwrap_or(u32::MAX);
        self.states.numbers.insert(*state, number);
        self.states.states.push(Worth {
            state: *state,
            idle,
            places: 0,
            epoch: 0,
        });
        number
    }

    /// Return the number of the node's current state, as [`Divvy::know`] does.
    fn before(&mut self, place: &RulePlace<'_>) -> u32 {
        if let Some(noted) = self.noted(place) {
            return noted.number;
        }
        let number = self.know(place.state);
        self.note(place, number).number
    }

    /// Return what is noted about the node's current state. The result is `None` if the state was never evaluated.
    fn noted(&self, place: &RulePlace<'_>) -> Option<Noted> {
        let noted = place.noted.get();
        if noted.generation == self.generation {
            return Some(noted);
        }
        let number = *self.states.numbers.get(place.state)?;
        Some(self.note(place, number))
    }

    fn note(&self, place: &RulePlace<'_>, number: u32) -> Noted {
        let noted = Noted {
            generation: self.generation,
            number,
            idle: self.states.states[number as usize].idle,
            ..place.noted.get()
        };
        place.noted.set(noted);
        noted
    }

    /// Return by how much the placement would make the node's fragments grow, in millionths of a thousandth of a GPU. A pod of a
    /// new class needs this for all nodes, so the fragments before the placement are noted with the state.
    fn growth(&self, place: &RulePlace<'_>, waste: &Waste) -> i64 {
        let mut noted = place.noted.get();
        if noted.fragments_generation != self.generation {
            noted.fragments = waste.fragments(place.state);
            noted.fragments_generation = self.generation;
            place.noted.set(noted);
        }
        waste.growth(place, noted.fragments)
    }

    /// Return the cost of a state. It is lower if less capacity is stranded and if the state's places are worth more.
    fn cost_of(&mut self, number: u32) -> i64 {
        let known = &mut self.states.states[number as usize];
        if known.epoch != self.epoch {
            let (shape, _) = &self.shapes[known.state.shape as usize];
            known.places = self.pressure.worth(&known.state, shape);
            known.epoch = self.epoch;
        }
        let places = if self.turnover.pods_end() {
            known.places
        } else {
            known.places / 2
        };
        known.idle - places
    }

    fn candidate(&mut self, place: &RulePlace<'_>, level: Option<u32>) -> u32 {
        let after = place.state.after(place.demand, place.amount, level).sorted();
        self.know(&after)
    }

    fn price(&self, place: &RulePlace<'_>) -> i64 {
        let price = self.scarcity.get(place.number()).copied().unwrap_or(0);
        price / 2 * i64::try_from(place.demand.milli(place.shape)).unwrap_or(i64::MAX)
    }
}

impl CostRule for Divvy {
    fn set_mix(&mut self, mix: &Mix, _shapes: &[NodeShape]) {
        self.mixture.set(mix);
        self.fit();
    }

    fn taken(&mut self, milli: u64) {
        if self.turnover.taken(milli) {
            self.fit();
        }
    }

    fn set_pods_end(&mut self, said: Option<bool>) {
        self.turnover.said = said;
        self.fit();
    }

    fn given_back(&mut self, milli: u64) {
        self.turnover.given_back(milli);
    }

    fn add_shape(&mut self, shape: &NodeShape) {
        self.shapes.push((*shape, 0));
        self.add_sequences(self.shapes.len() - 1);
    }

    fn set_shapes(&mut self, shapes: &[(NodeShape, u64)]) {
        self.shapes = shapes.to_vec();
        self.fit();
    }

    fn joined(&mut self, shape: usize) {
        self.shapes[shape].1 += 1;
        self.nodes += 1;
        self.turnover.capacity_milli += 1000 * u64::from(self.shapes[shape].0.gpus);
        self.inventory_changed();
    }

    fn left(&mut self, shape: usize) {
        self.shapes[shape].1 = self.shapes[shape].1.saturating_sub(1);
        self.nodes = self.nodes.saturating_sub(1);
        let gone = 1000 * u64::from(self.shapes[shape].0.gpus);
        self.turnover.capacity_milli = self.turnover.capacity_milli.saturating_sub(gone);
        self.inventory_changed();
    }

    fn arrived(&mut self, class: &Demand) {
        if self.mixture.add(class) {
            self.fit();
        }
        self.until_refresh = self.until_refresh.saturating_sub(1);
    }

    fn wants_states(&self) -> bool {
        // `states` is also the place where the table of states is cleared when it is too large.
        self.until_refresh == 0 || self.states.states.len() > self.limits.states
    }

    fn states(&mut self, states: &mut dyn Iterator<Item = (&PolicyNodeState, usize)>) {
        if self.reprice {
            self.scarcity = scarcity(&self.classes, &self.shapes);
            self.pressure = Pressure::new(&self.classes, &self.shapes);
            self.reprice = false;
        }
        let states: Vec<(&PolicyNodeState, usize)> = states.collect();
        let milli = |(state, nodes): &(&PolicyNodeState, usize)| {
            let (shape, _) = &self.shapes[state.shape as usize];
            state.total() * 1000 / u64::from(shape.gpu_size.max(1)) * *nodes as u64
        };
        let rise = if self.turnover.pods_end() {
            Rise::Linear
        } else {
            Rise::Square
        };
        self.idle_milli = states.iter().map(milli).sum();
        self.pressure.refresh(self.idle_milli, rise, &self.shapes, &states);
        self.until_refresh = (self.nodes / 4).max(16);
        self.epoch += 1;
        if self.states.states.len() > self.limits.states {
            self.forget_states();
        }
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn cost(&mut self, place: &RulePlace<'_>, kept: &mut KeptStates) -> i64 {
        if kept.generation != self.generation {
            *kept = KeptStates {
                generation: self.generation,
                before: self.before(place),
                ..KeptStates::default()
            };
            if place.takes_part() {
                for level in place.state.levels(place.amount).take(KeptStates::MOST) {
                    kept.after[usize::from(kept.count)] = self.candidate(place, Some(level));
                    kept.count += 1;
                }
            } else {
                kept.after[0] = self.candidate(place, None);
                kept.count = 1;
            }
        }
        let mut least: Option<(i64, usize)> = None;
        for (at, after) in kept.after[..usize::from(kept.count)].iter().enumerate() {
            let cost = self.cost_of(*after);
            // The fullest GPU comes last and wins a tie.
            if least.is_none_or(|(least, _)| cost <= least) {
                least = Some((cost, at));
            }
        }
        let (least, at) = least.unwrap_or((0, 0));
        let opens = if self.young || self.turnover.pods_end() {
            opens(place, at)
        } else {
            0
        };
        step(least - self.cost_of(kept.before) + self.price(place)) * OPENS + opens
    }

    fn is_dear(&self) -> bool {
        true
    }

    fn guess(&mut self, place: &RulePlace<'_>) -> i64 {
        let own = self.sequence_of.get(place.number()).copied();
        let guess = match (self.noted(place), own) {
            // At best, the placement leaves nothing stranded and takes away no valuable place.
            (Some(before), _) => -before.idle,
            (None, Some(own)) => self.growth(place, &self.waste[own]),
            (None, None) => 0,
        };
        step(guess + self.price(place)) * OPENS
    }

    fn effort(&self) -> (u64, u64) {
        // While a cluster only fills up, every mistake is permanent, so a decision may take longer. When pods end, mistakes soon
        // disappear. With `hurry`, a caller waits.
        if self.limits.hurry || self.turnover.pods_end() {
            (12, 2)
        } else {
            (48, 1000)
        }
    }

    fn work(&self) -> u64 {
        self.work
    }

    fn terms(&mut self, place: &RulePlace<'_>) -> Vec<CostTerm> {
        let level = if place.takes_part() { self.level(place) } else { None };
        let (before, after) = (self.before(place), self.candidate(place, level));
        let changes = self.cost_of(after) - self.cost_of(before);
        let idle = |number: u32| self.states.states[number as usize].idle;
        let stranding = idle(after) - idle(before);
        let milli = |micro: i64| (micro + MICRO / 2).div_euclid(MICRO);
        let term = |name, micro| CostTerm {
            name,
            milli: milli(micro),
        };
        vec![
            term("stranding", stranding),
            term("scarcity", self.price(place)),
            term("slot pressure", changes - stranding),
        ]
    }

    fn level(&mut self, place: &RulePlace<'_>) -> Option<u32> {
        let mut best: Option<(i64, u32)> = None;
        for level in place.state.levels(place.amount).take(KeptStates::MOST) {
            let after = self.candidate(place, Some(level));
            let cost = self.cost_of(after);
            // The fullest GPU comes last and wins a tie.
            if best.is_none_or(|(least, _)| cost <= least) {
                best = Some((cost, level));
            }
        }
        best.map(|(_, level)| level)
    }
}

/// Return the tie-breaker between nodes of equal cost: 0 for a GPU that is already shared, plus 1 if the pod would open an unused
/// GPU, plus 1 if the node is empty. So GPUs and nodes stay whole for kinds of pods that have not arrived yet, and for an
/// administrator or autoscaler that wants to remove a node. The tie-breaker is not used while a cluster with a known mix only
/// fills up, because then every node is opened in the end. `at` is the index of the level (the free amount of the chosen GPU)
/// that the pod gets.
fn opens(place: &RulePlace<'_>, at: usize) -> i64 {
    let empty = place.state.whole(place.shape) == u32::from(place.shape.gpus);
    let fresh = !place.takes_part() || (at == 0 && place.state.left[0] == place.shape.gpu_size);
    i64::from(empty) + i64::from(fresh)
}

/// One more than the largest value of [`opens`], so that a difference of one step in cost always outweighs the tie-breaker.
const OPENS: i64 = 3;

/// Convert a cost to whole steps, rounded up.
fn step(cost: i64) -> i64 {
    cost.saturating_add(STEP - 1).div_euclid(STEP)
}
