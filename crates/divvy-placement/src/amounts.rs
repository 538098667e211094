//! How often amounts of memory occur.

use std::collections::BTreeMap;

use divvy_model::MiB;

/// How often each amount of memory occurs.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct AmountCounts(BTreeMap<MiB, u64>);

impl AmountCounts {
    pub(crate) fn add(&mut self, amount: MiB) {
        *self.0.entry(amount).or_default() += 1;
    }

    pub(crate) fn remove(&mut self, amount: MiB) {
        if let Some(count) = self.0.get_mut(&amount) {
            *count -= 1;
            if *count == 0 {
                self.0.remove(&amount);
            }
        }
    }

    /// Return the part of this free memory that is too small a piece for a pod, in millionths: the mean over the pods that ask for these
    /// amounts. 0 if nothing is free, or if no pod asks for anything.
    pub(crate) fn too_small_for(&self, asked: &AmountCounts) -> u32 {
        let mut asked_rising = asked.0.iter().peekable();
        let (mut satisfied, mut useful, mut free) = (0_u128, 0_u128, 0_u128);
        for (amount, gpus) in &self.0 {
            while let Some((_, pods)) = asked_rising.next_if(|(asked, _)| *asked <= amount) {
                satisfied += u128::from(*pods);
            }
            let memory = u128::from(amount.0).saturating_mul(u128::from(*gpus));
            free = free.saturating_add(memory);
            useful = useful.saturating_add(memory.saturating_mul(satisfied));
        }
        let pods = asked.0.values().map(|pods| u128::from(*pods)).sum();
        let all = free.saturating_mul(pods);
        let lost = all.saturating_sub(useful);
        // Beyond 2^108 the quotient of the rounded numbers is precise enough.
        let scale = 1_000_000;
        let part = match lost.checked_mul(scale) {
            Some(scaled) => scaled.checked_div(all),
            None => lost.checked_div(all / scale),
        };
        u32::try_from(part.unwrap_or(0).min(scale)).unwrap_or(0)
    }
}
