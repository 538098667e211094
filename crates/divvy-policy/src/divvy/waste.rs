//! Waste: GPU capacity of a node that cannot be used right now. Once pods end and capacity is used again and again, waste counts
//! in addition to stranding.
//!
//! Waste consists of FGD's fragments ([`Fragments`]) and of unplaced capacity. For one class of pods, the unplaced capacity is
//! the free GPU capacity minus what the pods of this class would take if as many as fit were placed. The classes are weighted by
//! their frequency.

use super::super::fragments::Fragments;
use super::super::rule::RulePlace;
use super::super::state::PolicyNodeState;
use super::super::{Demand, Mix, NodeShape};
use super::pressure::{MICRO, places};

/// The waste on nodes with one kind of GPU.
#[derive(Debug, Clone)]
pub(crate) struct Waste {
    fragments: Fragments,
    /// The classes of pods that may use this kind of GPU: the class, the amount that it takes of one GPU, and its weight.
    classes: Vec<(Demand, u32, i64)>,
    /// The total weight of the classes that request GPUs but may not use this kind.
    pods_elsewhere: i64,
}

impl Waste {
    pub(crate) fn new(classes: &[(Demand, u64)], shape: &NodeShape) -> Waste {
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

    /// Return FGD's fragments of a state, in the unit that [`Waste::growth`] expects.
    pub(crate) fn fragments(&self, state: &PolicyNodeState) -> i64 {
        self.fragments.amount(state)
    }

    /// Return by how much the placement makes the fragments grow, in millionths of a thousandth of a GPU. This is a first guess
    /// at the placement's cost. `before` is [`Waste::fragments`] of the node's current state.
    pub(crate) fn growth(&self, place: &RulePlace<'_>, before: i64) -> i64 {
        let after = place.state.after(place.demand, place.amount, None);
        let growth = self.fragments.amount(&after) - before;
        micro(i128::from(growth), self.fragments.pods(), place.shape)
    }

    /// Return the waste of a state, in millionths of a thousandth of a GPU: the fragments plus a tenth of the unplaced capacity.
    pub(crate) fn amount(&self, state: &PolicyNodeState, shape: &NodeShape) -> i64 {
        let both = i128::from(self.fragments.amount(state)) + i128::from(self.unplaced(state, shape)) / 10;
        micro(both, self.fragments.pods(), shape)
    }

    /// Return the unplaced capacity of a state, in millionths of a thousandth of a GPU: the sum over the classes with GPUs,
    /// weighted by frequency, divided by the number of all pods.
    pub(crate) fn unplaced_micro(&self, state: &PolicyNodeState, shape: &NodeShape) -> i64 {
        micro(i128::from(self.unplaced(state, shape)), self.fragments.pods(), shape)
    }

    fn unplaced(&self, state: &PolicyNodeState, shape: &NodeShape) -> i64 {
        let total = i64::try_from(state.total()).unwrap_or(i64::MAX);
        let most = state.left.iter().copied().max().unwrap_or(0);
        let mut unplaced = total * self.pods_elsewhere;
        for (class, amount, weight) in &self.classes {
            // A shortcut: on most nodes, no GPU has enough left for most classes.
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

/// Divide an amount that was summed over `pods` pods by their number, and convert it to millionths of a thousandth of a GPU.
pub(crate) fn micro(amount: i128, pods: i64, shape: &NodeShape) -> i64 {
    let micro = amount * i128::from(MICRO) * 1000 / (i128::from(pods.max(1)) * i128::from(shape.gpu_size.max(1)));
    i64::try_from(micro).unwrap_or(i64::MAX)
}
