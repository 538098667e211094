//! A node's GPUs, as far as it matters what a pod holds of them.

use divvy_model::{Held, MemoryUnit, MiB, Pod, Vendor, WholeKind};

/// One GPU of [`NodeGpus`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuRef<'a> {
    /// The vendor, whose driver reports the GPU.
    pub vendor: Vendor,
    /// The driver's UUID. `None` on a node without an inventory, where the index is the GPU's only name.
    pub uuid: Option<&'a str>,
    /// The index among the vendor's GPUs.
    pub index: u32,
    /// As what the GPU is offered as a whole; `None` if it is not.
    pub whole: Option<WholeKind>,
    /// Whether the GPU's memory is shared. A GPU can be offered as a whole as well.
    pub is_shared: bool,
    /// Whether the GPU is gone: an earlier inventory listed it, and the driver no longer does.
    pub is_lost: bool,
    /// The memory that the GPU offers.
    pub capacity: MiB,
}

/// The GPUs of a node, so that [`crate::parts`] can say what a pod holds of them. [`crate::NodeState`] is one form; a program that shows a large cluster
/// keeps less of each node.
pub trait NodeGpus {
    /// Return the GPU at this position. The positions start at 0 and have no gap.
    fn gpu(&self, position: usize) -> Option<GpuRef<'_>>;

    /// Return the units in which pods of this node may have requested memory, in addition to the present one.
    fn other_units(&self) -> impl Iterator<Item = MemoryUnit>;

    /// Return all GPUs in the order of their positions.
    fn gpus(&self) -> impl Iterator<Item = GpuRef<'_>> {
        (0..).map_while(|position| self.gpu(position))
    }

    /// Return the position of the GPU with this UUID.
    fn by_uuid(&self, uuid: &str) -> Option<usize> {
        self.gpus().position(|gpu| gpu.uuid == Some(uuid))
    }

    /// Return the position of the shared GPU with this index. After a card was replaced, two GPUs may have the same index. In this case, return the GPU
    /// that is present, as the node's agent does. GPUs that are offered only as a whole, and those of another vendor than the default one, are left out:
    /// each vendor counts its own indices, and gpushare's annotations, which name GPUs by index, mean shared ones of the default vendor.
    fn by_index(&self, index: u32) -> Option<usize> {
        let is_named = |gpu: &GpuRef<'_>| gpu.is_shared && gpu.vendor == Vendor::default() && gpu.index == index;
        let of_index = self.gpus().enumerate().filter(|(_, gpu)| is_named(gpu));
        // On a tie the first.
        let present = of_index.min_by_key(|(_, gpu)| gpu.is_lost);
        present.map(|(position, _)| position)
    }

    /// Return the unit in which a bound pod was allocated its memory, if the amounts show that it was one of the node's other units.
    fn former_unit(&self, pod: &Pod) -> Option<MemoryUnit> {
        let Held::Allocation(allocation) = &pod.held else {
            return None;
        };
        let units = pod.request.effective_units()?;
        self.other_units().find(|unit| unit.memory(units) == Some(allocation.total()))
    }
}
