use divvy_placement::policy::{Placer, Policy};

use crate::{Order, Trace};

/// A mean of percentages, each in whole hundredths of a percent: that is how the published program logs them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Percent {
    hundredths: u64,
    count: u64,
}

impl Percent {
    fn add(&mut self, part: u64, whole: u64) {
        self.hundredths += rounded(part * 10_000, whole);
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inflation {
    /// GPU in use while 0 %, 1 %, 2 % … of the cluster's GPU had been asked for, rounded to the nearest percent: the published
    /// measure. The mean over the arrivals in that percent.
    pub used: Vec<Percent>,
    /// Thousandths of GPUs in use at the end.
    pub used_milli: u64,
    /// Pods that were placed.
    pub placed: u64,
    /// Pods that fitted nowhere, and were dropped.
    pub failed: u64,
    /// Thousandths of GPUs that had been asked for when the first pod failed.
    pub first_failure_milli: Option<u64>,
}

impl Inflation {
    /// GPU in use when so many percent had been asked for.
    pub fn at(&self, percent: usize) -> Option<f64> {
        self.used.get(percent)?.value()
    }
}

/// Offers the pods to the nodes in this order, one after another; a pod that fits nowhere is dropped.
///
/// FGD knows the mix of the whole list from the start, as published; the others know what has arrived.
pub fn inflate(trace: &Trace, order: &Order, policy: Policy) -> Inflation {
    let mut placer = Placer::new(policy);
    for (node, rank) in trace.nodes.iter().zip(&order.ranks) {
        placer.add(node.shape, node.shape.empty(), *rank);
    }
    if policy == Policy::Fgd {
        placer.set_mix(&trace.mix());
    }
    let capacity = trace.capacity_milli().max(1);
    let mut outcome = Inflation {
        used: Vec::new(),
        used_milli: 0,
        placed: 0,
        failed: 0,
        first_failure_milli: None,
    };
    let mut arrived = 0;
    for (number, row) in order.arrivals.iter().enumerate() {
        let pod = &trace.pods[*row];
        arrived += pod.gpu_milli();
        placer.arrived(&pod.demand);
        let decision = placer.decide(&pod.demand, number as u64);
        if decision.is_some_and(|decision| placer.take(&pod.demand, decision)) {
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
