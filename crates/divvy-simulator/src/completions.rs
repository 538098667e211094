use std::cmp::Reverse;
use std::collections::BinaryHeap;

use divvy_placement::policy::{Decision, Placer, Policy};

use crate::Trace;
use crate::random::Random;

/// Pods that come, run for a while and end; one that fits nowhere when it comes is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completions {
    /// GPU that is asked for, over what there is, in percent: what would be in use if nothing were ever lost.
    pub load_percent: u32,
    /// Arrivals before anything is counted.
    pub warm_up: u64,
    /// Arrivals that are counted.
    pub counted: u64,
    /// Of the random numbers.
    pub seed: u64,
}

/// What came of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Turnover {
    /// Thousandths of GPUs times time (in 2^-32 of the mean time between arrivals) in use while it was counted.
    pub used: u128,
    /// The same if all GPUs had been in use.
    pub capacity: u128,
    /// Thousandths of GPUs that were asked for.
    pub asked_milli: u64,
    /// Of those, thousandths that fitted nowhere.
    pub lost_milli: u64,
    /// Pods with 8 GPUs or more that came.
    pub large: u64,
    /// Of those, pods that fitted nowhere.
    pub large_lost: u64,
    /// Over the whole run: thousandths of GPUs times time that the placed pods had, pod by pod.
    pub had: u128,
    /// Over the whole run: thousandths of GPUs times time in use, moment by moment.
    pub used_in_all: u128,
}

impl Turnover {
    /// GPU in use, in percent.
    pub fn used_percent(&self) -> f64 {
        100.0 * self.used as f64 / self.capacity.max(1) as f64
    }

    /// GPU that was asked for and lost, in percent.
    pub fn lost_percent(&self) -> f64 {
        100.0 * self.lost_milli as f64 / self.asked_milli.max(1) as f64
    }

    /// Pods with 8 GPUs or more that were lost, in percent.
    pub fn large_lost_percent(&self) -> f64 {
        100.0 * self.large_lost as f64 / self.large.max(1) as f64
    }
}

/// Pods of the list come at random, each as likely as any other, in a Poisson stream; each runs for an exponential time.
pub fn turn_over(trace: &Trace, ranks: &[u64], policy: Policy, setting: &Completions) -> Turnover {
    let mut placer = Placer::new(policy);
    for (node, rank) in trace.nodes.iter().zip(ranks) {
        placer.add(node.shape, node.shape.empty(), *rank);
    }
    if policy == Policy::Fgd {
        placer.set_mix(&trace.mix());
    }
    let capacity = u128::from(trace.capacity_milli());
    let list_milli: u128 = trace.pods.iter().map(|pod| u128::from(pod.gpu_milli())).sum();
    // Mean lifetime in mean times between arrivals, as a fraction: load * capacity / (mean GPU of a pod).
    let lifetime = u128::from(setting.load_percent) * capacity * trace.pods.len() as u128;
    let over = 100 * list_milli.max(1);
    let mut random = Random::new(setting.seed);
    let mut running: BinaryHeap<Reverse<(u128, u64, usize, Decision)>> = BinaryHeap::new();
    let mut outcome = Turnover::default();
    let (mut now, mut used) = (0_u128, 0_u64);
    for number in 0..setting.warm_up + setting.counted {
        let counted = number >= setting.warm_up;
        let pass = |outcome: &mut Turnover, from: u128, to: u128, used: u64| {
            outcome.used_in_all += (to - from) * u128::from(used);
            if counted {
                outcome.used += (to - from) * u128::from(used);
                outcome.capacity += (to - from) * capacity;
            }
        };
        let next = now + u128::from(random.exponential());
        while let Some(Reverse((end, _, row, decision))) = running.peek().copied().filter(|Reverse((end, ..))| *end <= next) {
            running.pop();
            pass(&mut outcome, now, end, used);
            now = end;
            let pod = &trace.pods[row];
            placer.give_back(&pod.demand, decision);
            used -= pod.gpu_milli();
        }
        pass(&mut outcome, now, next, used);
        now = next;
        let row = random.below(trace.pods.len());
        let runs = u128::from(random.exponential()) * lifetime / over;
        let pod = &trace.pods[row];
        placer.arrived(&pod.demand);
        let decision = placer.decide(&pod.demand, number);
        let placed = decision.filter(|decision| placer.take(&pod.demand, *decision));
        if let Some(decision) = placed {
            used += pod.gpu_milli();
            outcome.had += runs * u128::from(pod.gpu_milli());
            running.push(Reverse((now + runs, number, row, decision)));
        }
        if counted {
            let lost = placed.is_none();
            outcome.asked_milli += pod.gpu_milli();
            outcome.lost_milli += if lost { pod.gpu_milli() } else { 0 };
            outcome.large += u64::from(pod.demand.gpus >= 8);
            outcome.large_lost += u64::from(pod.demand.gpus >= 8 && lost);
        }
    }
    // What still runs has not had all of its time.
    for Reverse((end, _, row, _)) in running {
        outcome.had -= (end - now) * u128::from(trace.pods[row].gpu_milli());
    }
    outcome
}

impl Completions {
    /// As the published measurements were made: 20,000 arrivals before 40,000 that count.
    pub fn at(load_percent: u32, seed: u64) -> Completions {
        Completions {
            load_percent,
            warm_up: 20_000,
            counted: 40_000,
            seed,
        }
    }
}
