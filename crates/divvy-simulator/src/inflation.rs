use std::collections::BTreeMap;

use divvy_policy::Fragmentation;

use crate::setting::Nodes;
use crate::size::count;
use crate::{Order, Setting, Size, Tally, Trace};

/// A mean of percentages, each rounded to a hundredth of a percent, because the published program logs them that way.
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

/// Divide, rounded to the nearest integer.
fn rounded(part: u64, whole: u64) -> u64 {
    (2 * part + whole) / (2 * whole)
}

/// The results of a simulation in which pods arrive and never leave.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inflation {
    /// The GPU capacity in use while 0 %, 1 %, 2 %, … of the cluster's GPU capacity had been requested, rounded to the nearest
    /// percent. This is the published measure: the mean over the arrivals in that percent.
    pub used: Vec<Percent>,
    /// By the same percent, if [`Setting::fragments`] is set: FGD's fragmentation, that is, the idle GPU capacity that the pods
    /// of the list cannot use, after the decision about the first pod of that percent.
    pub fragments: Vec<Percent>,
    /// The capacity in use at the end, in thousandths of a GPU.
    pub used_milli: u64,
    /// The number of pods that were placed.
    pub placed: u64,
    /// The number of pods that fitted nowhere and were dropped.
    pub failed: u64,
    /// The same numbers by size.
    pub by_size: BTreeMap<Size, Tally>,
    /// The capacity that had been requested when the first pod failed, in thousandths of a GPU.
    pub first_failure_milli: Option<u64>,
}

impl Inflation {
    /// Return the GPU capacity in use, in percent, when this percentage had been requested. If no pod arrived in exactly that
    /// percent, which happens in a small cluster, return what was in use before. `None` if this much was never requested.
    pub fn at(&self, percent: usize) -> Option<f64> {
        let there = self.used.get(percent)?;
        there.value().or_else(|| {
            let before = self.used[..percent].iter().rfind(|before| before.count > 0)?;
            Some(before.last as f64 / 100.0)
        })
    }
}

/// Offer the pods to the nodes in this order, one after another. A pod that fits nowhere is dropped.
///
/// FGD and `rf` know the mix of the whole list from the start, as published; the other policies know what has arrived.
pub fn inflate(trace: &Trace, order: &Order, setting: impl Into<Setting>) -> Inflation {
    let setting = setting.into();
    let mut nodes = Nodes::new(setting, trace, &order.ranks);
    let mut fragmentation = setting.fragments.then(|| Fragmentation::of(trace.mix().typical()));
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
        let first = outcome.used.len() <= percent;
        if first {
            outcome.used.resize(percent + 1, Percent::default());
        }
        outcome.used[percent].add(outcome.used_milli, capacity);
        if let Some(fragmentation) = fragmentation.as_mut().filter(|_| first) {
            outcome.fragments.resize(percent + 1, Percent::default());
            outcome.fragments[percent].add(fragmentation.milli(nodes.placer.nodes()), capacity);
        }
    }
    outcome
}
