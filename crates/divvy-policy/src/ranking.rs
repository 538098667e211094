//! How a policy ranks the nodes for a pod.

use crate::Cost;

/// The costs of a pod on some nodes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Ranking {
    /// The costs, in the order of the nodes in the request; `None` where the policy sees no room.
    pub costs: Vec<Option<Cost>>,
    /// The position of the best node.
    pub best: Option<usize>,
}
