//! Robust fragmentation (`rf`): FGD's fragments, plus a tenth of the unplaced capacity, plus a price for scarce products. It
//! shares code with the module `divvy`. The policy is kept for comparison: where pods end, it was the best policy published or
//! tried before `divvy`.

use super::divvy::{MICRO, Waste, micro, scarcity};
use super::fragments::Fragments;
use super::rule::{CostRule, KeptStates, RulePlace};
use super::state::PolicyNodeState;
use super::{Demand, Mix, NodeShape};

/// The step in which costs are compared: 20 thousandths of a GPU.
const STEP: i64 = 20 * MICRO;

#[derive(Debug, Default)]
pub(crate) struct Rf {
    /// The typical classes of pods, which define what a fragment is.
    typical: Mix,
    classes: Vec<(Demand, u64)>,
    /// By shape number: the shape and its number of nodes here, the waste in `waste`, and the price in `scarcity`.
    shapes: Vec<(NodeShape, u64)>,
    waste: Vec<(Fragments, Waste)>,
    scarcity: Vec<i64>,
    /// Whether the prices must be computed again.
    reprice: bool,
    epoch: u32,
}

impl Rf {
    fn change(&mut self) {
        self.reprice = true;
        self.epoch += 1;
    }

    fn price(&mut self, place: &RulePlace<'_>) -> i64 {
        if std::mem::take(&mut self.reprice) {
            self.scarcity = scarcity(&self.classes, &self.shapes);
        }
        let price = self.scarcity.get(place.number()).copied().unwrap_or(0);
        price / 2 * i64::try_from(place.demand.milli(place.shape)).unwrap_or(i64::MAX)
    }

    fn waste(&self, place: &RulePlace<'_>, state: &PolicyNodeState) -> i64 {
        let (fragments, waste) = &self.waste[place.number()];
        let fragments = micro(i128::from(fragments.amount(state)), fragments.pods(), place.shape);
        fragments + waste.unplaced_micro(state, place.shape) / 10
    }

    fn waste_on(&self, shape: &NodeShape) -> (Fragments, Waste) {
        (Fragments::of(&self.typical, shape), Waste::new(&self.classes, shape))
    }

    fn waste_after(&self, place: &RulePlace<'_>, level: Option<u32>) -> i64 {
        let after = place.state.after(place.demand, place.amount, level);
        self.waste(place, &after)
    }

    /// Return the least waste that a choice of the GPU causes, and the level (free amount) of that GPU. On a tie, the fullest GPU
    /// is chosen.
    fn least(&self, place: &RulePlace<'_>) -> Option<(i64, u32)> {
        let levels = place.state.levels(place.amount);
        let wastes = levels.map(|level| (self.waste_after(place, Some(level)), level));
        wastes.min_by_key(|(waste, level)| (*waste, *level))
    }
}

impl CostRule for Rf {
    fn set_mix(&mut self, mix: &Mix, _shapes: &[NodeShape]) {
        self.classes = mix.classes().map(|(class, count)| (*class, count)).collect();
        self.typical = mix.typical();
        self.waste = self.shapes.iter().map(|(shape, _)| self.waste_on(shape)).collect();
        self.change();
    }

    fn add_shape(&mut self, shape: &NodeShape) {
        self.shapes.push((*shape, 0));
        self.waste.push(self.waste_on(shape));
    }

    fn set_shapes(&mut self, shapes: &[(NodeShape, u64)]) {
        self.shapes = shapes.to_vec();
        self.waste = self.shapes.iter().map(|(shape, _)| self.waste_on(shape)).collect();
        self.change();
    }

    fn joined(&mut self, shape: usize) {
        self.shapes[shape].1 += 1;
        self.change();
    }

    fn left(&mut self, shape: usize) {
        self.shapes[shape].1 = self.shapes[shape].1.saturating_sub(1);
        self.change();
    }

    fn epoch(&self) -> u32 {
        self.epoch
    }

    fn cost(&mut self, place: &RulePlace<'_>, _kept: &mut KeptStates) -> i64 {
        let after = if place.takes_part() {
            self.least(place).map_or(0, |(waste, _)| waste)
        } else {
            self.waste_after(place, None)
        };
        let before = self.waste(place, place.state);
        (after - before + self.price(place)).div_euclid(STEP)
    }

    fn level(&mut self, place: &RulePlace<'_>) -> Option<u32> {
        self.least(place).map(|(_, level)| level)
    }
}
