use std::cell::Cell;
use std::fmt;

use super::state::{PolicyNodeState, StateView};
use super::{CostTerm, Demand, Mix, NodeShape};

/// A node state, and a pod that fits there.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RulePlace<'a> {
    pub(crate) demand: &'a Demand,
    /// The amount that the pod takes of each GPU, in the unit of [`NodeShape::gpu_size`].
    pub(crate) amount: u32,
    pub(crate) shape: &'a NodeShape,
    pub(crate) state: &'a PolicyNodeState,
    /// What the rule has noted about the state, for any pod.
    pub(crate) noted: &'a Cell<Noted>,
}

impl RulePlace<'_> {
    pub(crate) fn takes_part(&self) -> bool {
        self.demand.is_part(self.shape, self.amount)
    }

    /// Return the shape's number.
    pub(crate) fn number(&self) -> usize {
        self.state.shape as usize
    }
}

/// The part of a policy that computes costs.
///
/// A cost must be a function of the place and of what was reported to the rule since the rule was created. It must not depend on
/// the order in which costs are computed, because the placer decides which costs it computes, and when.
pub(crate) trait CostRule: fmt::Debug + Send {
    /// Return what the rule must see of a node in addition to the free amounts.
    fn view(&self) -> StateView {
        StateView::default()
    }

    /// Replace the mix of requests.
    fn set_mix(&mut self, _mix: &Mix, _shapes: &[NodeShape]) {}

    /// Record the arrival of a pod of this class.
    fn arrived(&mut self, _class: &Demand) {}

    /// Set whether pods end; `None` lets the rule measure it.
    fn set_pods_end(&mut self, _said: Option<bool>) {}

    /// Record that pods took this many thousandths of a GPU.
    fn taken(&mut self, _milli: u64) {}

    /// Record that pods released this many thousandths of a GPU.
    fn given_back(&mut self, _milli: u64) {}

    /// Add a shape. Shapes are numbered in the order of these calls.
    fn add_shape(&mut self, _shape: &NodeShape) {}

    /// Replace all shapes. The new ones are numbered in this order; each comes with its number of nodes.
    fn set_shapes(&mut self, _shapes: &[(NodeShape, u64)]) {}

    /// Record a new node of this shape.
    fn joined(&mut self, _shape: usize) {}

    /// Record that a node of this shape was removed.
    fn left(&mut self, _shape: usize) {}

    /// Report whether the rule must read the states of the nodes before the next decision.
    fn wants_states(&self) -> bool {
        false
    }

    /// Read the states of the nodes, each with its number of nodes.
    fn states(&mut self, _states: &mut dyn Iterator<Item = (&PolicyNodeState, usize)>) {}

    /// Return the epoch. When it changes, all costs computed before are out of date.
    fn epoch(&self) -> u32 {
        0
    }

    /// Return the cost of a place; lower is better. The placer calls this only where the pod fits. `kept` is what the rule has
    /// kept about this place since the last call.
    fn cost(&mut self, place: &RulePlace<'_>, kept: &mut KeptStates) -> i64;

    /// Report whether costs are so expensive to compute that only promising places should get an exact cost.
    fn is_dear(&self) -> bool {
        false
    }

    /// Return a cheap estimate of the cost, which should rather be too low than too high.
    fn guess(&mut self, _place: &RulePlace<'_>) -> i64 {
        0
    }

    /// Return two limits on the [`CostRule::work`] of one decision. The first is for the most promising places; it applies once
    /// one cost is known. The second is for the other places, which are examined in turn.
    fn effort(&self) -> (u64, u64) {
        (u64::MAX / 2, 0)
    }

    /// Return the amount of expensive work done so far.
    fn work(&self) -> u64 {
        0
    }

    /// Return the terms of the cost, for display. The list is empty if the cost is a single number.
    fn terms(&mut self, _place: &RulePlace<'_>) -> Vec<CostTerm> {
        Vec::new()
    }

    /// Return how much must be free on the GPU that a pod gets, if the pod takes a part of one. `None` stands for best fit: the
    /// least free amount that still suffices.
    fn level(&mut self, _place: &RulePlace<'_>) -> Option<u32> {
        None
    }
}

/// What a rule notes next to a state, so that it need not search for the state in its tables.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Noted {
    /// The generation in which `number` and `idle` are valid; 0 if nothing is noted.
    pub(crate) generation: u32,
    pub(crate) number: u32,
    pub(crate) idle: i64,
    /// FGD's fragments of the state, valid in `fragments_generation`.
    pub(crate) fragments: i64,
    pub(crate) fragments_generation: u32,
}

/// The numbers of states that a rule keeps for a place: the node's state before the placement, and after each possible placement.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct KeptStates {
    /// The generation in which the numbers are valid; 0 if nothing is kept.
    pub(crate) generation: u32,
    pub(crate) before: u32,
    pub(crate) after: [u32; KeptStates::MOST],
    pub(crate) count: u8,
}

impl KeptStates {
    pub(crate) const MOST: usize = 5;
}
