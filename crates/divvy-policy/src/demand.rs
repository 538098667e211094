use super::{ModelSet, NodeShape};

/// How much a pod requests of each of its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DemandShare {
    /// Thousandths of a GPU, regardless of its size; 1000 is a whole GPU.
    Milli(u16),
    /// Memory, in the unit of [`NodeShape::gpu_size`].
    Memory(u32),
}

impl DemandShare {
    /// A whole GPU, as a share.
    pub const WHOLE: DemandShare = DemandShare::Milli(1000);

    /// Return the share of a GPU of this size, in the unit of `gpu_size` and rounded up.
    pub fn of(self, gpu_size: u32) -> u32 {
        match self {
            DemandShare::Milli(1000) => gpu_size,
            DemandShare::Milli(milli) => {
                let amount = (u64::from(gpu_size) * u64::from(milli)).div_ceil(1000);
                u32::try_from(amount).unwrap_or(u32::MAX)
            }
            DemandShare::Memory(memory) => memory,
        }
    }
}

/// A pod's request, as the policies see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Demand {
    /// CPU in thousandths of a core.
    pub cpu_milli: u32,
    /// Main memory in MiB. No policy uses it, but the pod fits only a node that has this much free.
    pub memory_mib: u32,
    /// The number of GPUs; 0 for a pod that requests only CPU.
    pub gpus: u8,
    /// What the pod requests of each GPU.
    pub share: DemandShare,
    /// The products that the pod may use. A pod without GPUs may go anywhere.
    pub models: ModelSet,
}

impl Demand {
    /// Return the pod's class. Pods that differ only in main memory have the same class, because no policy distinguishes them.
    pub(crate) fn class(&self) -> Demand {
        Demand { memory_mib: 0, ..*self }
    }

    /// Return how much the pod takes of each GPU of a node with this shape. The result is `None` if the pod may not use these
    /// GPUs, if it requests more than one GPU has, or if it requests GPUs but an amount of 0.
    pub fn amount(&self, shape: &NodeShape) -> Option<u32> {
        if self.gpus == 0 {
            return Some(0);
        }
        let amount = self.share.of(shape.gpu_size);
        (self.models.allows(shape.model) && (1..=shape.gpu_size).contains(&amount)).then_some(amount)
    }

    /// Return how much GPU capacity the pod takes in total on a node with this shape, in thousandths of a GPU.
    pub fn milli(&self, shape: &NodeShape) -> u64 {
        let amount = match self.share {
            DemandShare::Milli(milli) => u64::from(milli),
            DemandShare::Memory(memory) => u64::from(memory) * 1000 / u64::from(shape.gpu_size.max(1)),
        };
        amount * u64::from(self.gpus)
    }

    /// Report whether the pod takes only a part of one GPU on a node with this shape. Only then does the choice of the GPU
    /// matter.
    pub(crate) fn is_part(&self, shape: &NodeShape, amount: u32) -> bool {
        self.gpus == 1 && amount < shape.gpu_size
    }

    /// Return the pod's kind for GPU clustering: 0 for a part of a GPU, n for n GPUs; `None` for a pod without GPUs.
    pub(crate) fn kind(&self, shape: &NodeShape, amount: u32) -> Option<usize> {
        match self.gpus {
            0 => None,
            1 if self.is_part(shape, amount) => Some(0),
            gpus => Some(usize::from(gpus).min(super::MOST_GPUS)),
        }
    }
}
