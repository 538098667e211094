//! Divvy's own policy: expected stranding, scarcity and slot pressure (docs/placement.md; research/placement.md, "ES").
//!
//! A place costs what a pod there would do to the node: how much more GPU is stranded when the usual pods come after it ([`sequences`]),
//! what the GPU's product is worth to those who can use no other ([`mixture::scarcity`]), and which places for large or choosy pods it takes
//! away ([`pressure`]). All in millionths of a thousandth of a GPU; compared in steps of ten thousandths.

pub(super) mod mixture;
mod pressure;
mod sequences;
mod turnover;
mod waste;

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::rule::{Kept, Noted, Place, Rule};
use super::state::State;
use super::{Demand, Limits, Mix, Shape, Term};
use crate::mixer::Mixer;
use mixture::Mixture;
pub(super) use mixture::scarcity;
pub(super) use pressure::MICRO;
use pressure::{Pressure, Rise};
use sequences::{Draw, SEQUENCES, Sequences};
use turnover::Turnover;
pub(super) use waste::{Waste, micro};

/// Costs are compared in steps of this.
const STEP: i64 = 10 * MICRO;

#[derive(Debug)]
pub(crate) struct Divvy {
    mixture: Mixture,
    classes: Vec<(Demand, u64)>,
    draw: Option<Draw>,
    /// The shapes and how many nodes have each.
    shapes: Vec<(Shape, u64)>,
    /// By number of the shape: which of `sequences` and of `waste` is its own.
    sequence_of: Vec<usize>,
    sequences: Vec<Sequences>,
    waste: Vec<Waste>,
    turnover: Turnover,
    scarcity: Vec<i64>,
    pressure: Pressure,
    states: Known,
    /// Arrivals until the prices of places are looked at again.
    until_refresh: u64,
    nodes: u64,
    idle_milli: u64,
    /// Scarcity and pressure are to be made anew.
    reprice: bool,
    /// Rises when all costs have changed.
    epoch: u32,
    /// Rises when states have other numbers.
    generation: u32,
    /// States that were evaluated.
    work: u64,
    limits: Limits,
    /// Few pods have been seen yet.
    young: bool,
}

/// What is known of states, by number.
#[derive(Debug, Default)]
struct Known {
    numbers: HashMap<State, u32, BuildHasherDefault<Mixer>>,
    states: Vec<Worth>,
}

#[derive(Debug)]
struct Worth {
    state: State,
    /// What stays of it whatever the prices, in millionths of a thousandth of a GPU.
    idle: i64,
    /// What its places are worth, and in which epoch they were.
    places: i64,
    epoch: u32,
}

impl Divvy {
    pub(crate) fn new(limits: Limits) -> Divvy {
        Divvy {
            mixture: Mixture::of_at_most(limits.classes),
            classes: Vec::new(),
            draw: None,
            shapes: Vec::new(),
            sequence_of: Vec::new(),
            sequences: Vec::new(),
            waste: Vec::new(),
            turnover: Turnover::default(),
            scarcity: Vec::new(),
            pressure: Pressure::default(),
            states: Known::default(),
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

    /// From now on the mix is as it was learnt to be.
    fn fit(&mut self) {
        self.classes = self.mixture.fit();
        self.young = self.mixture.is_young();
        // A pod without GPU strands GPU only by its CPU; at half its frequency the sequences foresee best (research/placement.md section 5).
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

    /// Scarcity and pressure hang on what there is.
    fn inventory_changed(&mut self) {
        (self.reprice, self.until_refresh) = (true, 0);
    }

    fn add_sequences(&mut self, number: usize) {
        let Some(draw) = &self.draw else { return };
        let (shape, _) = self.shapes[number];
        let like = |other: &(Shape, u64)| Sequences::same(&other.0, &shape);
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

    /// The number of a state, of which then all is known that does not hang on prices.
    fn know(&mut self, state: &State) -> u32 {
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
            // Nothing is known of what comes: all that is left is worth the same.
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

    /// As [`Divvy::know`], of the state in which the place is now.
    fn before(&mut self, place: &Place<'_>) -> u32 {
        if let Some(noted) = self.noted(place) {
            return noted.number;
        }
        let number = self.know(place.state);
        self.note(place, number).number
    }

    /// What is known of the state in which the place is now.
    fn noted(&self, place: &Place<'_>) -> Option<Noted> {
        let noted = place.noted.get();
        if noted.generation == self.generation {
            return Some(noted);
        }
        let number = *self.states.numbers.get(place.state)?;
        Some(self.note(place, number))
    }

    fn note(&self, place: &Place<'_>, number: u32) -> Noted {
        let noted = Noted {
            generation: self.generation,
            number,
            idle: self.states.states[number as usize].idle,
            ..place.noted.get()
        };
        place.noted.set(noted);
        noted
    }

    /// How much the fragments of a node grow, in millionths of a thousandth of a GPU. A pod of a new class asks this of all nodes.
    fn growth(&self, place: &Place<'_>, waste: &Waste) -> i64 {
        let mut noted = place.noted.get();
        if noted.fragments_generation != self.generation {
            noted.fragments = waste.fragments(place.state);
            noted.fragments_generation = self.generation;
            place.noted.set(noted);
        }
        waste.growth(place, noted.fragments)
    }

    /// What a state costs: the less stranded and the more places, the better.
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

    fn candidate(&mut self, place: &Place<'_>, level: Option<u32>) -> u32 {
        let after = place.state.after(place.demand, place.amount, level).sorted();
        self.know(&after)
    }

    fn price(&self, place: &Place<'_>) -> i64 {
        let price = self.scarcity.get(place.number()).copied().unwrap_or(0);
        price / 2 * i64::try_from(place.demand.milli(place.shape)).unwrap_or(i64::MAX)
    }
}

impl Rule for Divvy {
    fn set_mix(&mut self, mix: &Mix, _shapes: &[Shape]) {
        self.mixture.set(mix);
        self.fit();
    }

    fn taken(&mut self, milli: u64) {
        if self.turnover.taken(milli) {
            self.fit();
        }
    }

    fn say_whether_pods_end(&mut self, said: Option<bool>) {
        self.turnover.said = said;
        self.fit();
    }

    fn given_back(&mut self, milli: u64) {
        self.turnover.given_back(milli);
    }

    fn add_shape(&mut self, shape: &Shape) {
        self.shapes.push((*shape, 0));
        self.add_sequences(self.shapes.len() - 1);
    }

    fn set_shapes(&mut self, shapes: &[(Shape, u64)]) {
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
        // Where what is known of states is forgotten when it is too much.
        self.until_refresh == 0 || self.states.states.len() > self.limits.states
    }

    fn states(&mut self, states: &mut dyn Iterator<Item = (&State, usize)>) {
        if self.reprice {
            self.scarcity = scarcity(&self.classes, &self.shapes);
            self.pressure = Pressure::new(&self.classes, &self.shapes);
            self.reprice = false;
        }
        let states: Vec<(&State, usize)> = states.collect();
        let milli = |(state, nodes): &(&State, usize)| {
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

    fn cost(&mut self, place: &Place<'_>, kept: &mut Kept) -> i64 {
        if kept.generation != self.generation {
            *kept = Kept {
                generation: self.generation,
                before: self.before(place),
                ..Kept::default()
            };
            if place.takes_part() {
                for level in place.state.levels(place.amount).take(Kept::MOST) {
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
            // The fullest GPU comes last, and is taken of equals.
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

    fn guess(&mut self, place: &Place<'_>) -> i64 {
        let own = self.sequence_of.get(place.number()).copied();
        let guess = match (self.noted(place), own) {
            // At best no GPU is idle in vain any more, and no place of worth is lost.
            (Some(before), _) => -before.idle,
            (None, Some(own)) => self.growth(place, &self.waste[own]),
            (None, None) => 0,
        };
        step(guess + self.price(place)) * OPENS
    }

    fn effort(&self) -> (u64, u64) {
        // While a cluster fills up each mistake stays; when pods end it is gone soon, and somebody waits for the answer.
        if self.limits.hurry || self.turnover.pods_end() {
            (12, 2)
        } else {
            (48, 1000)
        }
    }

    fn work(&self) -> u64 {
        self.work
    }

    fn terms(&mut self, place: &Place<'_>) -> Vec<Term> {
        let level = if place.takes_part() { self.level(place) } else { None };
        let (before, after) = (self.before(place), self.candidate(place, level));
        let changes = self.cost_of(after) - self.cost_of(before);
        let idle = |number: u32| self.states.states[number as usize].idle;
        let stranding = idle(after) - idle(before);
        let milli = |micro: i64| (micro + MICRO / 2).div_euclid(MICRO);
        let term = |name, micro| Term {
            name,
            milli: milli(micro),
        };
        vec![
            term("stranding", stranding),
            term("scarcity", self.price(place)),
            term("slot pressure", changes - stranding),
        ]
    }

    fn level(&mut self, place: &Place<'_>) -> Option<u32> {
        let mut best: Option<(i64, u32)> = None;
        for level in place.state.levels(place.amount).take(Kept::MOST) {
            let after = self.candidate(place, Some(level));
            let cost = self.cost_of(after);
            // The fullest GPU comes last, and wins of equals.
            if best.is_none_or(|(least, _)| cost <= least) {
                best = Some((cost, level));
            }
        }
        best.map(|(_, level)| level)
    }
}

/// Of places that cost the same the one is taken where a GPU is shared that is shared already, then one on a node in use: what is whole stays
/// whole for pods of a kind that never came, and for who wants to take the node away. Not while a cluster whose pods are known only fills up: there
/// all of it is opened in the end. `at`: which of the levels the pod gets.
fn opens(place: &Place<'_>, at: usize) -> i64 {
    let empty = place.state.whole(place.shape) == u32::from(place.shape.gpus);
    let fresh = !place.takes_part() || (at == 0 && place.state.left[0] == place.shape.gpu_size);
    i64::from(empty) + i64::from(fresh)
}

/// One more than the most that [`opens`] says.
const OPENS: i64 = 3;

/// In whole steps, rounded up.
fn step(cost: i64) -> i64 {
    cost.saturating_add(STEP - 1).div_euclid(STEP)
}
