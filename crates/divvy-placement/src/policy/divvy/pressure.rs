//! Slot pressure: how dearly a node's places are needed by the pods that cannot go everywhere, those with several GPUs and those that
//! name their models (research/placement.md section 1, P).

use super::super::state::State;
use std::collections::BTreeMap;

use super::super::{Demand, MOST_GPUS, Model, ModelSet, Shape, Share};

/// At most so many classes are watched: those that ask for the most GPU.
const MOST: usize = 256;

/// When so much was seen, and no pod with several GPUs, none is feared.
const MANY: u64 = 1000 * super::mixture::ONE;

/// Millionths: 1 in fixed point.
pub(crate) const MICRO: i64 = 1_000_000;

#[derive(Debug, Clone)]
struct Watched {
    class: Demand,
    weight: u64,
    /// By number of the shape: what it takes of a GPU, `None` where it may not be.
    amounts: Vec<Option<u32>>,
    milli: u64,
    /// Price of one place, in millionths of a thousandth of a GPU.
    price: i64,
}

/// The constrained classes and what a place for each is worth now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Pressure {
    watched: Vec<Watched>,
    /// Sum over all classes of weight times thousandths of GPUs.
    demand: u128,
}

/// How sharply a price rises.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rise {
    /// With the demand per place.
    Linear,
    /// With its square.
    Square,
}

impl Pressure {
    pub(crate) fn new(classes: &[(Demand, u64)], shapes: &[(Shape, u64)]) -> Pressure {
        let watch = |(class, weight): &(Demand, u64)| Watched {
            class: *class,
            weight: *weight,
            amounts: shapes.iter().map(|(shape, _)| class.amount(shape)).collect(),
            milli: super::mixture::milli(class, shapes),
            price: 0,
        };
        let mut classes: Vec<(Demand, u64)> = classes.iter().filter(|(class, _)| class.gpus > 0).copied().collect();
        let seen: u64 = classes.iter().map(|(_, weight)| weight).sum();
        if seen < MANY || classes.iter().any(|(class, _)| class.gpus > 1) {
            classes.extend(whole_nodes(shapes));
        }
        let all: Vec<Watched> = classes.iter().map(watch).collect();
        let wanted = |watched: &Watched| u128::from(watched.weight) * u128::from(watched.milli);
        let demand = all.iter().map(wanted).sum();
        let mut watched: Vec<Watched> = all
            .into_iter()
            .filter(|watched| watched.milli > 0)
            .filter(|watched| watched.class.gpus > 1 || watched.class.models != ModelSet::ANY)
            .collect();
        watched.sort_by_key(|watched| (std::cmp::Reverse(wanted(watched)), watched.class));
        watched.truncate(MOST);
        Pressure { watched, demand }
    }

    /// Sets the prices anew from what is idle now, in thousandths of GPUs, and the states of the nodes with how many are in each.
    pub(crate) fn refresh<'a>(
        &mut self,
        idle_milli: u64,
        rise: Rise,
        shapes: &[(Shape, u64)],
        states: impl Iterator<Item = (&'a State, usize)> + Clone,
    ) {
        let demand = self.demand.max(1);
        for watched in &mut self.watched {
            let places: u128 = states
                .clone()
                .map(|(state, nodes)| watched.places(state, &shapes[state.shape as usize].0) as u128 * nodes as u128)
                .sum();
            // Demand per place: its share of what is idle, over what its places hold; at most 3.
            let wanted = u128::from(watched.weight) * u128::from(idle_milli) * MICRO as u128;
            let per_place = wanted
                .checked_div(demand * places)
                .map_or(3 * MICRO, |ratio| i64::try_from(ratio).unwrap_or(i64::MAX).min(3 * MICRO));
            let lambda = match rise {
                Rise::Linear => per_place,
                Rise::Square => per_place * per_place / MICRO,
            };
            watched.price = lambda.saturating_mul(i64::try_from(watched.milli).unwrap_or(i64::MAX));
        }
    }

    /// What all places of a node in this state are worth, in millionths of a thousandth of a GPU.
    pub(crate) fn worth(&self, state: &State, shape: &Shape) -> i64 {
        let worth = |watched: &Watched| watched.price * i64::from(watched.places(state, shape));
        self.watched.iter().filter(|watched| watched.price > 0).map(worth).sum()
    }
}

/// Before any came it must be feared that pods come which need a whole node: half of one for each product and number of GPUs.
fn whole_nodes(shapes: &[(Shape, u64)]) -> impl Iterator<Item = (Demand, u64)> {
    let mut least_cpu: BTreeMap<(Model, u8), u32> = BTreeMap::new();
    for (shape, _) in shapes.iter().filter(|(shape, nodes)| *nodes > 0 && shape.gpus > 1) {
        let cpu = least_cpu.entry((shape.model, shape.gpus)).or_insert(u32::MAX);
        *cpu = shape.cpu_milli.min(*cpu);
    }
    least_cpu.into_iter().map(|((model, gpus), cpu_milli)| {
        let class = Demand {
            // A little is taken by what runs on every node.
            cpu_milli: cpu_milli - cpu_milli / 16,
            memory_mib: 0,
            gpus,
            share: Share::WHOLE,
            models: ModelSet::NONE.with(model),
        };
        (class, super::mixture::ONE / 2)
    })
}

impl Watched {
    fn places(&self, state: &State, shape: &Shape) -> u32 {
        match self.amounts.get(state.shape as usize) {
            Some(Some(amount)) => places(&self.class, *amount, state, shape),
            _ => 0,
        }
    }
}

/// How many pods of a class, which takes so much of each GPU, a node in this state has room for, as if each were the only kind.
pub(crate) fn places(class: &Demand, amount: u32, state: &State, shape: &Shape) -> u32 {
    let by_cpu = state.cpu_milli.checked_div(class.cpu_milli).unwrap_or(u32::MAX);
    if by_cpu == 0 {
        return 0;
    }
    let left = &state.left[..usize::from(shape.gpus).min(MOST_GPUS)];
    let by_gpu: u32 = match class.gpus {
        0 => u32::MAX,
        1 if amount == shape.gpu_size => state.whole(shape),
        1 => left.iter().map(|left| left / amount).sum(),
        gpus => {
            let enough = left.iter().filter(|left| **left >= amount).count();
            u32::try_from(enough).unwrap_or(0) / u32::from(gpus)
        }
    };
    by_cpu.min(by_gpu)
}
