//! GPU products as small numbers, and sets of them.

use std::collections::BTreeMap;

/// A GPU product, as a number assigned by [`Models`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Model(u8);

/// A set of GPU products, for example the products that a pod may use.
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

    /// Return the product's number. A new product gets one. The result is `None` if [`Models::MOST`] other products have numbers.
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

    /// Report whether all numbers are in use.
    pub fn is_full(&self) -> bool {
        self.numbers.len() >= Self::MOST
    }

    /// Forget all products that are not in `used`. Their numbers will be reused.
    pub fn retain(&mut self, used: ModelSet) {
        self.numbers.retain(|_, model| used.allows(*model));
    }
}
