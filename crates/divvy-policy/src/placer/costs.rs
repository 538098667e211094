use std::ops::Range;

/// The cost of a slot where the pod does not fit, or where nothing is known.
pub(super) const NO_FIT: i64 = i64::MAX;

/// The number of costs that share one entry of `least`.
const BLOCK: usize = 64;

/// A cost for each slot, and the lowest cost of each block of [`BLOCK`] slots. Thanks to the blocks, finding the lowest cost
/// reads only one number per block.
#[derive(Debug, Default)]
pub(super) struct Costs {
    amounts: Vec<i64>,
    /// By block: the lowest cost in the block.
    least: Vec<i64>,
}

impl Costs {
    pub(super) fn len(&self) -> usize {
        self.amounts.len()
    }

    /// Grow to this number of slots. New slots have no cost.
    pub(super) fn grow(&mut self, slots: usize) {
        self.amounts.resize(slots, NO_FIT);
        self.least.resize(slots.div_ceil(BLOCK), NO_FIT);
    }

    pub(super) fn get(&self, slot: usize) -> i64 {
        self.amounts[slot]
    }

    /// Set the cost of a slot, and return its previous cost.
    pub(super) fn set(&mut self, slot: usize, amount: i64) -> i64 {
        let before = std::mem::replace(&mut self.amounts[slot], amount);
        let block = slot / BLOCK;
        if amount <= self.least[block] {
            self.least[block] = amount;
        } else if before == self.least[block] {
            self.least[block] = least_of(&self.amounts[self.slots_of(block)]);
        }
        before
    }

    /// Move all costs from `other` to `self`, and return the number of moved costs.
    ///
    /// Both must have the same number of slots, and no slot may have a cost in both.
    pub(super) fn take_from(&mut self, other: &mut Costs) -> usize {
        let mut taken = 0;
        for (here, there) in self.amounts.iter_mut().zip(&mut other.amounts) {
            if *there != NO_FIT {
                *here = std::mem::replace(there, NO_FIT);
                taken += 1;
            }
        }
        for (here, there) in self.least.iter_mut().zip(&mut other.least) {
            *here = std::mem::replace(there, NO_FIT).min(*here);
        }
        taken
    }

    pub(super) fn least(&self) -> i64 {
        least_of(&self.least)
    }

    /// Return all slots with this cost, in ascending order. The cost must not be [`NO_FIT`].
    pub(super) fn with(&self, amount: i64) -> impl Iterator<Item = usize> {
        let blocks = self.least.iter().enumerate().filter(move |(_, least)| **least <= amount);
        let slots = blocks.flat_map(|(block, _)| self.slots_of(block));
        slots.filter(move |slot| self.amounts[*slot] == amount)
    }

    /// Return the first slot that has a cost, starting at `slot`.
    pub(super) fn known_from(&self, slot: usize) -> Option<usize> {
        let known = |slot: &usize| self.amounts[*slot] != NO_FIT;
        let block = slot / BLOCK;
        let here = slot..self.slots_of(block).end.max(slot);
        here.into_iter().find(known).or_else(|| {
            let later = self.least.iter().skip(block + 1).position(|least| *least != NO_FIT)?;
            self.slots_of(block + 1 + later).find(known)
        })
    }

    /// Return all slots that have a cost, with their costs, in ascending order of the slots.
    pub(super) fn known(&self) -> impl Iterator<Item = (usize, i64)> {
        let all = self.amounts.iter().copied().enumerate();
        all.filter(|(_, amount)| *amount != NO_FIT)
    }

    fn slots_of(&self, block: usize) -> Range<usize> {
        block * BLOCK..((block + 1) * BLOCK).min(self.amounts.len())
    }
}

/// Return the lowest of these costs. Four are compared at a time, so that not every comparison has to wait for the previous one.
fn least_of(amounts: &[i64]) -> i64 {
    let (fours, rest) = amounts.as_chunks::<4>();
    let mut least = [NO_FIT; 4];
    for four in fours {
        for (least, amount) in least.iter_mut().zip(four) {
            *least = *amount.min(least);
        }
    }
    least.iter().chain(rest).copied().min().unwrap_or(NO_FIT)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn blocks_say_what_all_costs_together_say(
            slots in 1_usize..200,
            changes in proptest::collection::vec((0_usize..200, prop_oneof![Just(NO_FIT), 0_i64..6]), 0..400),
            from in 0_usize..200,
        ) {
            let mut costs = Costs::default();
            costs.grow(slots);
            let mut plain = vec![NO_FIT; slots];
            for (slot, amount) in changes {
                let slot = slot % slots;
                prop_assert_eq!(costs.set(slot, amount), plain[slot]);
                plain[slot] = amount;
            }
            let least = plain.iter().copied().min().unwrap_or(NO_FIT);
            prop_assert_eq!(costs.least(), least);
            for amount in 0..6 {
                let equal: Vec<usize> = (0..slots).filter(|slot| plain[*slot] == amount).collect();
                prop_assert_eq!(costs.with(amount).collect::<Vec<_>>(), equal);
            }
            let first = (from..slots).find(|slot| plain[*slot] != NO_FIT);
            prop_assert_eq!(costs.known_from(from.min(slots)), first.filter(|_| from < slots));
        }
    }
}
