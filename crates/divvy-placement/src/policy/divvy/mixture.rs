//! What pods ask for, learnt from those that came.

use std::collections::HashMap;
use std::hash::BuildHasherDefault;

use super::super::hash::Mixer;
use super::super::{Demand, Mix, Shape};

/// What one arrival counts when it is new.
pub(crate) const ONE: u64 = 1 << 10;
/// When as many arrivals count as this, all of them are halved: older ones fade.
const WINDOW: u64 = 8192 * ONE;
/// A class that counts for less is forgotten.
const LEAST: u64 = ONE / 64;

/// Counts of arrivals by class, in which older ones fade.
#[derive(Debug)]
pub(crate) struct Mixture {
    /// Tenants choose what they ask for, so there may be as many classes as pods; of more than this the rarest are left out.
    most: usize,
    counts: HashMap<Demand, u64, BuildHasherDefault<Mixer>>,
    total: u64,
    /// Arrivals since the start, for when to fit again.
    arrivals: u64,
    fit_at: u64,
}

impl Mixture {
    pub(crate) fn of_at_most(classes: usize) -> Mixture {
        Mixture {
            most: classes,
            counts: HashMap::default(),
            total: 0,
            arrivals: 0,
            fit_at: 0,
        }
    }

    /// A pod came. True if it is time to [`Mixture::fit`].
    pub(crate) fn add(&mut self, class: &Demand) -> bool {
        *self.counts.entry(*class).or_default() += ONE;
        self.total += ONE;
        self.arrivals += 1;
        if self.total >= WINDOW {
            self.fade();
        }
        self.leave_out_the_rarest();
        self.arrivals > self.fit_at
    }

    /// Whether too few came to say much of those to come.
    pub(crate) fn is_young(&self) -> bool {
        self.arrivals <= 64
    }

    /// As if these had come, and nothing before.
    pub(crate) fn set(&mut self, mix: &Mix) {
        *self = Mixture::of_at_most(self.most);
        for (class, count) in mix.classes() {
            self.counts.insert(*class, count * ONE);
            self.total += count * ONE;
        }
        self.arrivals = mix.total();
        while self.total >= WINDOW {
            self.fade();
        }
        self.leave_out_the_rarest();
    }

    /// A quarter more than need be, so that this is not done for each pod.
    fn leave_out_the_rarest(&mut self) {
        if self.counts.len() <= self.most {
            return;
        }
        let mut classes: Vec<(u64, Demand)> = self.counts.iter().map(|(class, count)| (*count, *class)).collect();
        classes.sort_unstable_by(|a, b| b.cmp(a));
        for (_, class) in classes.drain(self.most - self.most / 4..) {
            self.counts.remove(&class);
        }
        self.total = self.counts.values().sum();
    }

    fn fade(&mut self) {
        self.counts.retain(|_, count| {
            *count /= 2;
            *count >= LEAST
        });
        self.total = self.counts.values().sum();
    }

    /// The classes with their weights, those that want much GPU last. The next fit is due after 40 % more arrivals, and at the
    /// latest after 2000.
    pub(crate) fn fit(&mut self) -> Vec<(Demand, u64)> {
        self.fit_at = match self.arrivals {
            0..64 => self.arrivals.next_power_of_two().max(1),
            arrivals => arrivals + (arrivals * 2 / 5).min(2000),
        };
        let mut classes: Vec<(Demand, u64)> = self.counts.iter().map(|(class, count)| (*class, *count)).collect();
        // Neighbours are alike, so that quantiles are.
        classes.sort_unstable_by_key(|(class, _)| (class.gpus, class.share, class.cpu_milli, *class));
        classes
    }
}

/// What a GPU of each shape is worth beyond itself, in thousandths, from who needs it: for every class that fits an empty node of the
/// shape the GPU that it asks for, over all GPU where it could have that (research/fgd.md section 3, scarcity price). Demand is scaled to the
/// cluster's GPU.
pub(crate) fn scarcity(classes: &[(Demand, u64)], shapes: &[(Shape, u64)]) -> Vec<i64> {
    let gpu = |shape: &Shape, nodes: u64| u128::from(shape.gpus) * u128::from(nodes);
    let all: u128 = shapes.iter().map(|(shape, nodes)| gpu(shape, *nodes)).sum();
    let fits = |class: &Demand, shape: &Shape| {
        class.gpus <= shape.gpus && class.cpu_milli <= shape.cpu_milli && class.amount(shape).is_some()
    };
    let mut wanted: Vec<(&Demand, u128, u128)> = Vec::new();
    for (class, weight) in classes.iter().filter(|(class, _)| class.gpus > 0) {
        let room: u128 = shapes
            .iter()
            .filter(|(shape, _)| fits(class, shape))
            .map(|(shape, nodes)| gpu(shape, *nodes))
            .sum();
        if room > 0 {
            wanted.push((class, u128::from(*weight) * u128::from(milli(class, shapes)), room));
        }
    }
    let total: u128 = wanted.iter().map(|(_, demand, _)| demand).sum();
    let price = |shape: &Shape| -> i64 {
        let here = wanted.iter().filter(|(class, ..)| fits(class, shape));
        // demand / total * all / room, in millionths.
        let sum: u128 = here
            .map(|(_, demand, room)| demand * all * 1_000_000 / (total.max(1) * room))
            .sum();
        i64::try_from(sum).unwrap_or(i64::MAX)
    };
    shapes.iter().map(|(shape, _)| price(shape)).collect()
}

/// Thousandths of GPUs that a pod of the class takes: the most of all shapes where it may be.
pub(crate) fn milli(class: &Demand, shapes: &[(Shape, u64)]) -> u64 {
    let may = shapes
        .iter()
        .filter(|(shape, nodes)| *nodes > 0 && class.amount(shape).is_some());
    may.map(|(shape, _)| class.milli(shape)).max().unwrap_or(0)
}
