use std::collections::BTreeMap;

use super::Shape;

/// How much of each of its GPUs a pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Share {
    /// Thousandths of a GPU, whatever its size; 1000 is a whole one.
    Milli(u16),
    /// Memory, in what [`Shape::gpu_size`] counts.
    Memory(u32),
}

impl Share {
    /// A whole GPU.
    pub const WHOLE: Share = Share::Milli(1000);

    /// The same in what a GPU of this size counts, rounded up.
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

/// A GPU product, as a number that [`Models`] gave it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Model(u8);

/// The GPU products that a pod may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ModelSet(u128);

impl ModelSet {
    /// Every product, also those that are not known yet.
    pub const ANY: ModelSet = ModelSet(u128::MAX);
    /// No product.
    pub const NONE: ModelSet = ModelSet(0);

    /// With this one, too.
    pub fn with(self, model: Model) -> ModelSet {
        ModelSet(self.0 | 1 << model.0)
    }

    /// Whether this one may be used.
    pub fn allows(self, model: Model) -> bool {
        self.0 >> model.0 & 1 == 1
    }
}

/// Numbers for the names of GPU products. No decision depends on which has which.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Models {
    numbers: BTreeMap<String, Model>,
}

impl Models {
    /// How many products can be told apart.
    pub const MOST: usize = 128;

    /// The product's number; a new one if it was not seen yet. `None` when there are [`Models::MOST`] others.
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

    /// Whether there is no number left.
    pub fn is_full(&self) -> bool {
        self.numbers.len() >= Self::MOST
    }

    /// Forgets all but these; their numbers are given again.
    pub fn retain(&mut self, used: ModelSet) {
        self.numbers.retain(|_, model| used.allows(*model));
    }
}

/// What a pod asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Demand {
    /// CPU in thousandths of a core.
    pub cpu_milli: u32,
    /// Main memory in MiB. No policy looks at it; a node must have it.
    pub memory_mib: u32,
    /// Of how many different GPUs; none for a pod that asks for CPU only.
    pub gpus: u8,
    /// How much of each of them.
    pub share: Share,
    /// Which products. A pod without GPUs may go anywhere.
    pub models: ModelSet,
}

impl Demand {
    /// Pods that differ in main memory only are alike to all policies.
    pub(crate) fn class(&self) -> Demand {
        Demand { memory_mib: 0, ..*self }
    }

    /// How much it takes of each GPU of such a node; `None` if it may not use them, asks
    /// for more than one has, or for GPUs and nothing of them.
    pub fn amount(&self, shape: &Shape) -> Option<u32> {
        if self.gpus == 0 {
            return Some(0);
        }
        let amount = self.share.of(shape.gpu_size);
        (self.models.allows(shape.model) && (1..=shape.gpu_size).contains(&amount)).then_some(amount)
    }

    /// Thousandths of GPUs of such a node that it takes in all.
    pub fn milli(&self, shape: &Shape) -> u64 {
        let amount = match self.share {
            Share::Milli(milli) => u64::from(milli),
            Share::Memory(memory) => u64::from(memory) * 1000 / u64::from(shape.gpu_size.max(1)),
        };
        amount * u64::from(self.gpus)
    }

    /// Whether it takes a part of one GPU of such a node, so that it matters which.
    pub(crate) fn is_part(&self, shape: &Shape, amount: u32) -> bool {
        self.gpus == 1 && amount < shape.gpu_size
    }

    /// For GPU clustering: 0 takes a part of a GPU, n takes n GPUs.
    pub(crate) fn kind(&self, shape: &Shape, amount: u32) -> Option<usize> {
        match self.gpus {
            0 => None,
            1 if self.is_part(shape, amount) => Some(0),
            gpus => Some(usize::from(gpus).min(super::MOST_GPUS)),
        }
    }
}
