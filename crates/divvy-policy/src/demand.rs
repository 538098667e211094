use std::collections::BTreeMap;

use super::Shape;

/// How much a pod requests of each of its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Share {
    /// Thousandths of a GPU, regardless of its size; 1000 is a whole GPU.
    Milli(u16),
    /// Memory, in the unit of [`Shape::gpu_size`].
    Memory(u32),
}

impl Share {
    /// The share of a whole GPU.
    pub const WHOLE: Share = Share::Milli(1000);

    /// Convert to the unit in which a GPU of this size counts, rounded up.
    pub fn of(self, gpu_size: u32) -> u32 {
        match self {
            Share::Milli(1000) => gpu_size,
            Share::Milli(milli) => {
                let amount = (u64::from(gpu_size) * u64::from(milli)).div_ceil(1000);
                u32::try_from(amount).unwrap_or(u32::MAX)
            }
            Share::Memory(memory) => memory,
        }
    }
}

/// A GPU product, as a number assigned by [`Models`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Model(u8);

/// A set of GPU products, for example those that a pod may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelSet(u128);

impl ModelSet {
    /// Every product, including those that are not known yet.
    pub const ANY: ModelSet = ModelSet(u128::MAX);
    /// The empty set.
    pub const NONE: ModelSet = ModelSet(0);

    /// Return the set with this product added.
    pub fn with(self, model: Model) -> ModelSet {
        ModelSet(self.0 | 1 << model.0)
    }

    /// Report whether the set contains this product.
    pub fn allows(self, model: Model) -> bool {
        self.0 >> model.0 & 1 == 1
    }
}

/// Assigns numbers to the names of GPU products. No decision depends on which product has which number.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Models {
    numbers: BTreeMap<String, Model>,
}

impl Models {
    /// The maximum number of products, because a [`ModelSet`] has one bit for each.
    pub const MOST: usize = 128;

    /// Return the product's number, and assign one if the product is new. `None` if there are [`Models::MOST`] other products.
    pub fn number(&mut self, name: &str) -> Option<Model> {
        if let Some(known) = self.numbers.get(name) {
            return Some(*known);
        }
        if self.numbers.len() >= Self::MOST {
            return None;
        }
        let taken = self.numbers.values().fold(ModelSet::NONE, |taken, model| taken.with(*model));
        let model = Model(u8::try_from(taken.0.trailing_ones()).ok()?);
        self.numbers.insert(name.to_owned(), model);
        Some(model)
    }

    /// Report whether all numbers are assigned.
    pub fn is_full(&self) -> bool {
        self.numbers.len() >= Self::MOST
    }

    /// Forget all products except these. Their numbers will be reused.
    pub fn retain(&mut self, used: ModelSet) {
        self.numbers.retain(|_, model| used.allows(*model));
    }
}

/// A pod's request, as the policies see it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Demand {
    /// CPU in thousandths of a core.
    pub cpu_milli: u32,
    /// Main memory in MiB. No policy uses it, but a node must have it.
    pub memory_mib: u32,
    /// The number of GPUs; 0 for a pod that requests only CPU.
    pub gpus: u8,
    /// How much of each GPU.
    pub share: Share,
    /// The products that the pod may use. A pod without GPUs may go anywhere.
    pub models: ModelSet,
}

impl Demand {
    /// Return the pod's class: to all policies, pods that differ only in main memory are alike.
    pub(crate) fn class(&self) -> Demand {
        Demand { memory_mib: 0, ..*self }
    }

    /// Return how much the pod takes of each GPU of such a node. `None` if the pod may not use these GPUs, if it requests more
    /// than one GPU has, or if it requests GPUs but nothing of them.
    pub fn amount(&self, shape: &Shape) -> Option<u32> {
        if self.gpus == 0 {
            return Some(0);
        }
        let amount = self.share.of(shape.gpu_size);
        (self.models.allows(shape.model) && (1..=shape.gpu_size).contains(&amount)).then_some(amount)
    }

    /// Return how much the pod takes of all its GPUs on such a node, in thousandths of a GPU.
    pub fn milli(&self, shape: &Shape) -> u64 {
        let amount = match self.share {
            Share::Milli(milli) => u64::from(milli),
            Share::Memory(memory) => u64::from(memory) * 1000 / u64::from(shape.gpu_size.max(1)),
        };
        amount * u64::from(self.gpus)
    }

    /// Report whether the pod takes a part of one GPU of such a node, so that the choice of the GPU matters.
    pub(crate) fn is_part(&self, shape: &Shape, amount: u32) -> bool {
        self.gpus == 1 && amount < shape.gpu_size
    }

    /// Return the pod's kind for GPU clustering: 0 for a part of a GPU, n for n GPUs; `None` for a pod without GPUs.
    pub(crate) fn kind(&self, shape: &Shape, amount: u32) -> Option<usize> {
        match self.gpus {
            0 => None,
            1 if self.is_part(shape, amount) => Some(0),
            gpus => Some(usize::from(gpus).min(super::MOST_GPUS)),
        }
    }
}
