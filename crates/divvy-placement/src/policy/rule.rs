use std::fmt;

use super::state::{State, View};
use super::{Demand, Mix, Shape};

/// A pod that would fit on a node in some state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) demand: &'a Demand,
    /// What the pod takes of each GPU.
    pub(crate) amount: u32,
    pub(crate) shape: &'a Shape,
    pub(crate) state: &'a State,
}

impl Place<'_> {
    pub(crate) fn takes_part(&self) -> bool {
        self.demand.is_part(self.shape, self.amount)
    }

    /// The shape's.
    pub(crate) fn number(&self) -> usize {
        self.state.shape as usize
    }
}

/// How a policy values places. A function of the place and of what was told since it was made: never of the cluster's history.
pub(crate) trait Rule: fmt::Debug + Send {
    /// What it must see of a node.
    fn view(&self) -> View {
        View::default()
    }

    /// This is what pods ask for from now on. Costs change.
    fn set_mix(&mut self, _mix: &Mix, _shapes: &[Shape]) {}

    /// A node of a new shape came; shapes are numbered in the order of these calls.
    fn add_shape(&mut self, _shape: &Shape) {}

    /// Lower is better. Asked only where the pod fits.
    fn cost(&mut self, place: &Place<'_>) -> i64;

    /// For a pod that takes a part of a GPU: how much must be left of the GPU that it gets. `None`: the least that is enough.
    fn level(&mut self, _place: &Place<'_>) -> Option<u32> {
        None
    }
}
