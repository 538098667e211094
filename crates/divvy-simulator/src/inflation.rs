use std::collections::BTreeMap;

use divvy_policy::Fragmentation;

use crate::setting::Nodes;
use crate::size::count;
use crate::{Order, Setting, Size, Tally, Trace};

/// A mean of percentages, each in whole hundredths of a percent: that is how the published program logs them.
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

    /// In percent; `None` if nothing was counted.
    pub fn value(&self) -> Option<f64> {
        // Sums of traces are far below 2^53.
        (self.count > 0).then(|| self.hundredths as f64 / self.count as f64 / 100.0)
    }
}

/// To the nearest whole number.
fn rounded(part: u64, whole: u64) -> u64 {
    (2 * part + whole) / (2 * whole)
}

/// What came of pods that arrived and never left.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inflation {
    /// GPU in use while 0 %, 1 %, 2 % … of the cluster's GPU had been asked for, rounded to the nearest percent: the published
    /// measure. The mean over the arrivals in that percent.
    pub used: Vec<Percent>,
    /// By the same percent, where [`Setting::fragments`] asks for it: idle GPU that the list's pods cannot use by FGD's measure, when the first
    /// pod of that percent had been decided on.
    pub fragments: Vec<Percent>,
    /// Thousandths of GPUs in use at the end.
    pub used_milli: u64,
    /// Pods that were placed.
    pub placed: u64,
    /// Pods that fitted nowhere, and were dropped.
    pub failed: u64,
    /// The same by size.
    pub by_size: BTreeMap<Size, Tally>,
    /// Thousandths of GPUs that had been asked for when the first pod failed.
    pub first_failure_milli: Option<u64>,
}

impl Inflation {
    /// GPU in use when so many percent had been asked for; where no pod arrived in just that percent (a small cluster) what was in use
    /// before. `None` if so much never was.
    pub fn at(&self, percent: usize) -> Option<f64> {
        let there = self.used.get(percent)?;
        there.value().or_else(|| {
            let before = self.used[..percent].iter().rfind(|before| before.count > 0)?;
            Some(before.last as f64 / 100.0)
        })
    }
}

/// Offers the pods to the nodes in this order, one after another; a pod that fits nowhere is dropped.
///
/// FGD knows the mix of the whole list from the start, as published; the others know what has arrived.
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
