//! What a node has when it is empty.

use super::Model;

/// The maximum number of GPUs of a node as the policies see it. A node with more GPUs is described as several nodes.
pub const MOST_GPUS: usize = 16;

/// What a node has when it is empty. All its GPUs are alike: a node with different GPUs is described as several nodes
/// ([`crate::from_ledger`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeShape {
    /// The product of the GPUs.
    pub model: Model,
    /// The number of GPUs, at most [`MOST_GPUS`].
    pub gpus: u8,
    /// The size of one GPU, in the unit of the source: 1000 in traces, the memory in MiB in the ledger.
    pub gpu_size: u32,
    /// CPU in thousandths of a core.
    pub cpu_milli: u32,
    /// Main memory in MiB.
    pub memory_mib: u32,
}
