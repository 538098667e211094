use std::cell::Cell;
use std::fmt;

use super::state::{State, View};
use super::{Demand, Mix, Shape, Term};

/// A pod that would fit on a node in some state.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    pub(crate) demand: &'a Demand,
    /// What the pod takes of each GPU.
    pub(crate) amount: u32,
    pub(crate) shape: &'a Shape,
    pub(crate) state: &'a State,
    /// What the rule noted of the state the last time, whatever the pod was.
    pub(crate) noted: &'a Cell<Noted>,
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

/// How a policy values places. A function of the place and of what was told since it was made: never of the order in which it was asked.
pub(crate) trait Rule: fmt::Debug + Send {
    /// What it must see of a node.
    fn view(&self) -> View {
        View::default()
    }

    /// This is what pods ask for from now on, whatever came before.
    fn set_mix(&mut self, _mix: &Mix, _shapes: &[Shape]) {}

    /// A pod of this class came.
    fn arrived(&mut self, _class: &Demand) {}

    /// Whether pods end; `None`: it is to see for itself.
    fn say_whether_pods_end(&mut self, _said: Option<bool>) {}

    /// So many thousandths of GPUs were taken.
    fn taken(&mut self, _milli: u64) {}

    /// So many were given back.
    fn given_back(&mut self, _milli: u64) {}

    /// There is a new shape; shapes are numbered in the order of these calls.
    fn add_shape(&mut self, _shape: &Shape) {}

    /// From now on the shapes are these, numbered in this order, with so many nodes of each; whatever came before.
    fn set_shapes(&mut self, _shapes: &[(Shape, u64)]) {}

    /// A node of this shape came.
    fn joined(&mut self, _shape: usize) {}

    /// A node of this shape went.
    fn left(&mut self, _shape: usize) {}

    /// Whether it wants to see how the nodes stand before the next decision.
    fn wants_states(&self) -> bool {
        false
    }

    /// The states of the nodes, and how many nodes are in each.
    fn states(&mut self, _states: &mut dyn Iterator<Item = (&State, usize)>) {}

    /// Changes when costs that were asked for before are no longer right.
    fn epoch(&self) -> u32 {
        0
    }

    /// Lower is better. Asked only where the pod fits. `kept`: what was found out the last time, about the same place.
    fn cost(&mut self, place: &Place<'_>, kept: &mut Kept) -> i64;

    /// Whether costs are so dear that only the promising are to be asked for.
    fn is_dear(&self) -> bool {
        false
    }

    /// About the cost, rather too little than too much, and cheap to know.
    fn guess(&mut self, _place: &Place<'_>) -> i64 {
        0
    }

    /// For one decision: how much [`Rule::work`] at most among the most promising places, once one cost is known, and among others in turn.
    fn effort(&self) -> (u64, u64) {
        (u64::MAX / 2, 0)
    }

    /// Rises with what is dear.
    fn work(&self) -> u64 {
        0
    }

    /// What the cost is made of, for people. Empty: it is one number.
    fn terms(&mut self, _place: &Place<'_>) -> Vec<Term> {
        Vec::new()
    }

    /// For a pod that takes a part of a GPU: how much must be left of the GPU that it gets. `None`: the least that is enough.
    fn level(&mut self, _place: &Place<'_>) -> Option<u32> {
        None
    }
}

/// What a rule notes beside a state in which nodes are, so as not to search for it.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Noted {
    /// What it is of; 0: nothing is noted.
    pub(crate) generation: u32,
    pub(crate) number: u32,
    pub(crate) idle: i64,
    /// FGD's fragments in that state, and what they are of.
    pub(crate) fragments: i64,
    pub(crate) fragments_generation: u32,
}

/// Numbers that a rule keeps with a place.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Kept {
    /// What they are numbers of; 0: nothing is kept.
    pub(crate) generation: u32,
    pub(crate) before: u32,
    pub(crate) after: [u32; Kept::MOST],
    pub(crate) count: u8,
}

impl Kept {
    pub(crate) const MOST: usize = 5;
}
