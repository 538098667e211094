//! With pods that end, a node's room is used again and again: then what cannot be used now counts beside what will be stranded. FGD's
//! fragments, and the GPU beyond the places that pods of each class would find (research/fgd.md section 3, F and U).

use super::super::fragments::Fragments;
use super::super::rule::Place;
use super::super::state::State;
use super::super::{Demand, Mix, Shape};
use super::pressure::{MICRO, places};

/// For nodes with one kind of GPU.
#[derive(Debug, Clone)]
pub(crate) struct Waste {
    fragments: Fragments,
    /// Pods with GPUs: the class, what it takes of a GPU, its weight.
    classes: Vec<(Demand, u32, i64)>,
    /// Weight of classes that may not be here, or have no GPU.
    pods_elsewhere: i64,
}

impl Waste {
    pub(crate) fn new(classes: &[(Demand, u64)], shape: &Shape) -> Waste {
        let mix: Mix = classes.iter().copied().collect();
        let weigh = |weight: u64| i64::try_from(weight).unwrap_or(i64::MAX);
        let with_gpu = || classes.iter().filter(|(class, _)| class.gpus > 0);
        let here = |(class, weight): &(Demand, u64)| Some((*class, class.amount(shape)?, weigh(*weight)));
        let elsewhere = with_gpu().filter(|(class, _)| class.amount(shape).is_none());
        Waste {
            fragments: Fragments::of(&mix, shape),
            classes: with_gpu().filter_map(here).collect(),
            pods_elsewhere: elsewhere.map(|(_, weight)| weigh(*weight)).sum(),
        }
    }

    /// What is useless in a state, in what [`Waste::growth`] wants to know of the state before.
    pub(crate) fn fragments(&self, state: &State) -> i64 {
        self.fragments.amount(state)
    }

    /// How much the fragments grow, in millionths of a thousandth of a GPU: a first guess at what a place costs. `before`: [`Waste::fragments`] of
    /// the place's state.
    pub(crate) fn growth(&self, place: &Place<'_>, before: i64) -> i64 {
        let after = place.state.after(place.demand, place.amount, None);
        let growth = self.fragments.amount(&after) - before;
        micro(i128::from(growth), self.fragments.pods(), place.shape)
    }

    /// In millionths of a thousandth of a GPU: the fragments, and a tenth of what finds no place.
    pub(crate) fn amount(&self, state: &State, shape: &Shape) -> i64 {
        let both = i128::from(self.fragments.amount(state)) + i128::from(self.unplaced(state, shape)) / 10;
        micro(both, self.fragments.pods(), shape)
    }

    /// What finds no place: GPU beyond the places that pods of each class would find, weighted by how many those are, over all pods.
    pub(crate) fn unplaced_micro(&self, state: &State, shape: &Shape) -> i64 {
        micro(i128::from(self.unplaced(state, shape)), self.fragments.pods(), shape)
    }

    fn unplaced(&self, state: &State, shape: &Shape) -> i64 {
        let total = i64::try_from(state.total()).unwrap_or(i64::MAX);
        let most = state.left.iter().copied().max().unwrap_or(0);
        let mut unplaced = total * self.pods_elsewhere;
        for (class, amount, weight) in &self.classes {
            // On most nodes no GPU has enough for most classes.
            let places = if *amount > most {
                0
            } else {
                places(class, *amount, state, shape)
            };
            let placed = i64::from(places) * i64::from(*amount) * i64::from(class.gpus);
            unplaced += weight * (total - placed);
        }
        unplaced
    }
}

/// In millionths of a thousandth of a GPU: an amount that so many pods have together.
pub(crate) fn micro(amount: i128, pods: i64, shape: &Shape) -> i64 {
    let micro = amount * i128::from(MICRO) * 1000 / (i128::from(pods.max(1)) * i128::from(shape.gpu_size.max(1)));
    i64::try_from(micro).unwrap_or(i64::MAX)
}
