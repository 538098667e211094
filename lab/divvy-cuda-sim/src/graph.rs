//! Graphs, as far as they concern memory: nodes that allocate and free, and what a launch takes of the GPU.

use std::collections::{BTreeMap, BTreeSet};

/// The graphs of this process, by handle.
#[derive(Debug, Default)]
pub(crate) struct Graphs {
    pub(crate) graphs: BTreeMap<usize, Vec<GraphNode>>,
    pub(crate) executables: BTreeMap<usize, Executable>,
    /// The addresses of all nodes that allocate.
    pub(crate) addresses: BTreeSet<u64>,
}

/// A graph that can be launched.
#[derive(Debug, Clone)]
pub(crate) struct Executable {
    pub(crate) nodes: Vec<GraphNode>,
    /// Whether a launch frees what the launch before has left (CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH).
    pub(crate) frees: bool,
}

/// A node. The simulation runs nodes in the order in which they were added.
#[derive(Debug, Clone, Copy)]
pub(crate) enum GraphNode {
    Allocate { device: usize, address: u64, bytes: u64 },
    Free { address: u64 },
    Kernel { length: u64 },
    Other,
}

/// The memory of a device that belongs to graphs (`CUgraphMem_attribute`).
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct GraphMemory {
    pub(crate) used: u64,
    pub(crate) used_high: u64,
    pub(crate) reserved: u64,
    pub(crate) reserved_high: u64,
}
