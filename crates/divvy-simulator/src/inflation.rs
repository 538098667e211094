use std::collections::BTreeMap;

use crate::setting::SettingNodes;
use crate::size::count;
use crate::{FitTally, Order, Setting, Size, Trace};

/// A mean of percentages. Each is rounded to a hundredth of a percent, because the published program logs them that way.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Percent {
    hundredths: u64,
    count: u64,
    last: u64,
}

impl Percent {
    fn add(&mut self, part: u64, whole: u64) {
        self.last = rounded(part * 10_000, whole);
        self.hundredths += self.last;
        self.count += 1;
    }

    /// Return the mean in percent; `None` if nothing was counted.
    pub fn value(&self) -> Option<f64> {
        // The sums of traces are far below 2^53.
        (self.count > 0).then(|| self.hundredths as f64 / self.count as f64 / 100.0)
    }
}

/// Divide, and round to the nearest integer.
fn rounded(part: u64, whole: u64) -> u64 {
    (2 * part + whole) / (2 * whole)
}

/// The results of a simulation in which pods arrive and never leave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inflation {
    /// The GPU capacity in use, by the requested part of the cluster's GPU capacity (0 %, 1 %, 2 %, …), rounded to the nearest
    /// percent. This is the published measure: the mean over all arrivals within that percent.
    pub used: Vec<Percent>,
    /// The capacity in use at the end, in thousandths of a GPU.
    pub used_milli: u64,
    /// The number of pods that were placed.
    pub placed: u64,
    /// The number of pods that were dropped because they fitted nowhere.
    pub failed: u64,
    /// The numbers of arrived and of dropped pods, by size.
    pub by_size: BTreeMap<Size, FitTally>,
    /// The capacity that had been requested when the first pod failed, in thousandths of a GPU.
    pub first_failure_milli: Option<u64>,
}

impl Inflation {
    /// Return the GPU capacity in use, in percent, when `percent` percent of the capacity had been requested. If no pod arrived
    /// in exactly that percent, which happens in a small cluster, return the last value before. The result is `None` if this much
    /// was never requested.
    pub fn at(&self, percent: usize) -> Option<f64> {
        let there = self.used.get(percent)?;
        there.value().or_else(|| {
            let before = self.used[..percent].iter().rfind(|before| before.count > 0)?;
            Some(before.last as f64 / 100.0)
        })
    }
}

/// Place the pods on the nodes in this order, one after another. A pod that fits nowhere is dropped.
///
/// FGD and `rf` know the mix of the whole list from the start, as in the publication. The other policies know only what has
/// arrived.
pub fn inflate(trace: &Trace, order: &Order, setting: impl Into<Setting>) -> Inflation {
    let mut nodes = SettingNodes::new(setting.into(), trace, &order.ranks);
    let capacity = trace.capacity_milli().max(1);
    let mut outcome = Inflation::default();
    let mut arrived = 0;
    for (number, row) in (0..).zip(&order.arrivals) {
        let pod = &trace.pods[*row];
        arrived += pod.gpu_milli();
        let placed = nodes.offer(&pod.demand, number).is_some();
        count(&mut outcome.by_size, &pod.demand, placed);
        if placed {
            outcome.placed += 1;
            outcome.used_milli += pod.gpu_milli();
        } else {
            outcome.failed += 1;
            outcome.first_failure_milli.get_or_insert(arrived);
        }
        let percent = usize::try_from(rounded(100 * arrived, capacity)).unwrap_or(usize::MAX);
        if outcome.used.len() <= percent {
            outcome.used.resize(percent + 1, Percent::default());
        }
        outcome.used[percent].add(outcome.used_milli, capacity);
    }
    outcome
}
