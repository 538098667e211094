//! What the pages show.

use std::collections::BTreeMap;
use std::sync::Arc;

use divvy_model::usage::Usage;
use divvy_view::{NoUsage, NodeView, View, WaitingPod};

/// What is known of a cluster at one time.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterScene {
    /// When it was read, in seconds since 1970.
    pub at: u64,
    /// The allocations.
    pub view: View,
    /// What the agents answered, by node. A node that was not asked has no entry.
    pub answers: BTreeMap<String, MeasuredUsage>,
    /// The pods that wait for GPUs.
    pub waiting: Vec<WaitingPod>,
    /// Sentences about what is not known, and why: a missing right, a broken watch.
    pub notices: Vec<String>,
}

/// The answer of a node's agent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredUsage {
    /// When it was read, in seconds since 1970.
    pub at: u64,
    /// The answer, or why there is none.
    pub usage: Result<Usage, NoUsage>,
}

impl ClusterScene {
    /// Return the node of this name.
    pub fn node(&self, name: &str) -> Option<&NodeView> {
        let at = self.view.nodes.binary_search_by(|node| node.name.as_str().cmp(name)).ok()?;
        self.view.nodes.get(at).map(Arc::as_ref)
    }

    /// Return the nodes, sorted by name.
    pub(crate) fn nodes(&self) -> impl ExactSizeIterator<Item = &NodeView> {
        self.view.nodes.iter().map(Arc::as_ref)
    }

    /// Return what the agent of a node measured. `None` if it was not asked or gave no answer.
    pub(crate) fn usage(&self, node: &str) -> Option<&Usage> {
        self.answers.get(node)?.usage.as_ref().ok()
    }
}
