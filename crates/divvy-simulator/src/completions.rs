use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use divvy_policy::Decision;

use crate::random::Random;
use crate::setting::SettingNodes;
use crate::size::count;
use crate::{Error, FitTally, Setting, Size, Trace};

/// A simulation in which pods arrive, run for a while, and end. A pod that fits nowhere when it arrives is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completions {
    /// The load in percent: the GPU capacity that would be in use if no pod were ever lost, in relation to the cluster's.
    pub load_percent: u32,
    /// How long pods run.
    pub lifetimes: Lifetimes,
    /// First, pods arrive all at once until they have requested this percentage of the cluster's GPU capacity.
    pub fill_percent: u32,
    /// The number of arrivals before the counting starts.
    pub warm_up: u64,
    /// The number of arrivals that are counted.
    pub counted: u64,
    /// Finally, pods arrive all at once again until they have requested this percentage of the cluster's GPU capacity.
    pub flood_percent: u32,
    /// The seed of the random numbers.
    pub seed: u64,
}

/// How long pods run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Lifetimes {
    /// Exponentially distributed, independent of the pod.
    #[default]
    Exponential,
    /// In proportion to how long the pod existed in the trace.
    Trace,
}

/// The results of a simulation in which pods end.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Turnover {
    /// The GPU capacity in use, in thousandths of a GPU, multiplied by time and summed over the counted part of the run. The unit
    /// of time is 2^-32 of the mean time between arrivals, or 1 second in [`replay`].
    pub used: u128,
    /// The value that `used` would have if all GPUs had always been in use.
    pub capacity: u128,
    /// The requested capacity, in thousandths of a GPU.
    pub asked_milli: u64,
    /// The part of the requested capacity for which there was no room, in thousandths of a GPU.
    pub lost_milli: u64,
    /// The number of pods that arrived and the number that were lost, by size.
    pub by_size: BTreeMap<Size, FitTally>,
    /// The capacity in use after the burst of pods at the beginning, in thousandths of a GPU.
    pub filled_milli: u64,
    /// The capacity in use after the burst of pods at the end, in thousandths of a GPU.
    pub flooded_milli: u64,
    /// The use of GPU capacity in the whole run, summed pod by pod: thousandths of a GPU multiplied by time.
    pub had: u128,
    /// The use of GPU capacity in the whole run, summed over time. It must equal `had`.
    pub used_in_all: u128,
}

impl Turnover {
    /// Return the GPU capacity in use, in percent.
    pub fn used_percent(&self) -> f64 {
        100.0 * self.used as f64 / self.capacity.max(1) as f64
    }

    /// Return the requested GPU capacity that was lost, in percent.
    pub fn lost_percent(&self) -> f64 {
        100.0 * self.lost_milli as f64 / self.asked_milli.max(1) as f64
    }

    /// Return the number of pods that arrived, and the number of pods that were lost.
    pub fn pods(&self) -> FitTally {
        self.sum(|_| true)
    }

    /// Return the same numbers for pods with 8 GPUs or more.
    pub fn large(&self) -> FitTally {
        self.sum(|size| size >= Size::Whole(8))
    }

    fn sum(&self, which: impl Fn(Size) -> bool) -> FitTally {
        let of_them = self.by_size.iter().filter(|(size, _)| which(**size));
        of_them.fold(FitTally::default(), |sum, (_, tally)| FitTally {
            asked: sum.asked + tally.asked,
            failed: sum.failed + tally.failed,
        })
    }
}

/// A cluster in which pods arrive and end.
struct ChurningCluster<'a> {
    trace: &'a Trace,
    nodes: SettingNodes,
    capacity: u128,
    /// The running pods: the end time, the pod's number, its row, and its place.
    running: BinaryHeap<Reverse<(u128, u64, usize, Decision)>>,
    now: u128,
    used_milli: u64,
    arrivals: u64,
    counted: bool,
    outcome: Turnover,
}

impl<'a> ChurningCluster<'a> {
    fn new(trace: &'a Trace, ranks: &[u64], setting: Setting) -> ChurningCluster<'a> {
        ChurningCluster {
            trace,
            nodes: SettingNodes::new(setting, trace, ranks),
            capacity: u128::from(trace.capacity_milli()),
            running: BinaryHeap::new(),
            now: 0,
            used_milli: 0,
            arrivals: 0,
            counted: false,
            outcome: Turnover::default(),
        }
    }

    /// Let time pass until this moment, and end the pods whose lifetime is over.
    fn pass(&mut self, until: u128) {
        while let Some(Reverse((end, _, row, decision))) = self.running.peek().copied().filter(|Reverse((end, ..))| *end <= until)
        {
            self.running.pop();
            self.idle(end);
            let pod = &self.trace.pods[row];
            self.nodes.placer.give_back(&pod.demand, decision);
            self.used_milli -= pod.gpu_milli();
        }
        self.idle(until);
    }

    /// Let time pass without any event.
    fn idle(&mut self, until: u128) {
        let used = (until - self.now) * u128::from(self.used_milli);
        self.outcome.used_in_all += used;
        if self.counted {
            self.outcome.used += used;
            self.outcome.capacity += (until - self.now) * self.capacity;
        }
        self.now = until;
    }

    /// Try to place a newly arrived pod, which then runs for the time `runs`.
    fn offer(&mut self, row: usize, runs: u128) {
        let pod = &self.trace.pods[row];
        let number = self.arrivals;
        self.arrivals += 1;
        let placed = self.nodes.offer(&pod.demand, number);
        if let Some(decision) = placed {
            self.used_milli += pod.gpu_milli();
            self.outcome.had += runs * u128::from(pod.gpu_milli());
            self.running.push(Reverse((self.now + runs, number, row, decision)));
        }
        if self.counted {
            self.outcome.asked_milli += pod.gpu_milli();
            self.outcome.lost_milli += if placed.is_none() { pod.gpu_milli() } else { 0 };
            count(&mut self.outcome.by_size, &pod.demand, placed.is_some());
        }
    }

    /// Let pods arrive all at once, until they have requested this percentage of the GPU capacity.
    fn burst(&mut self, percent: u32, mut next: impl FnMut() -> (usize, u128)) {
        let most = self.capacity * u128::from(percent) / 100;
        let mut asked = 0;
        while asked < most {
            let (row, runs) = next();
            asked += u128::from(self.trace.pods[row].gpu_milli());
            self.offer(row, runs);
        }
    }

    fn finish(mut self) -> Turnover {
        // Pods that still run have not used all of their time.
        for Reverse((end, _, row, _)) in self.running {
            self.outcome.had -= (end - self.now) * u128::from(self.trace.pods[row].gpu_milli());
        }
        self.outcome
    }
}

/// Simulate a Poisson stream of pods. Each pod is drawn at random from the list, all with the same chance.
///
/// # Errors
///
/// Fails if the list requests no GPU at all, or if lifetimes of the trace are needed and a pod has none.
pub fn turn_over(
    trace: &Trace,
    ranks: &[u64],
    setting: impl Into<Setting>,
    completions: &Completions,
) -> Result<Turnover, Error> {
    let mut clock = ChurningCluster::new(trace, ranks, setting.into());
    // A pod's lifetime, in mean times between arrivals, is its random number or its time in the trace, multiplied by this
    // fraction. The fraction is chosen so that the running pods request the given load.
    let weigh = |row: usize| match completions.lifetimes {
        Lifetimes::Exponential => Ok(1),
        Lifetimes::Trace => trace.pods[row].seconds.map(u128::from).ok_or_else(|| no_time(trace, row)),
    };
    let mut weight = 0;
    for row in 0..trace.pods.len() {
        weight += u128::from(trace.pods[row].gpu_milli()) * weigh(row)?;
    }
    if weight == 0 {
        return Err(Error::NoGpu);
    }
    let lifetime = u128::from(completions.load_percent) * clock.capacity * trace.pods.len() as u128;
    let over = 100 * weight;
    let mut random = Random::new(completions.seed);
    let pod = |random: &mut Random| {
        let row = random.below(trace.pods.len());
        let runs = match completions.lifetimes {
            Lifetimes::Exponential => u128::from(random.exponential()),
            // Every pod of the list has a lifetime: this was checked above.
            Lifetimes::Trace => u128::from(trace.pods[row].seconds.unwrap_or(0)) << 32,
        };
        (row, runs * lifetime / over)
    };
    clock.burst(completions.fill_percent, || pod(&mut random));
    clock.outcome.filled_milli = clock.used_milli;
    for number in 0..completions.warm_up + completions.counted {
        clock.counted = number >= completions.warm_up;
        let next = clock.now + u128::from(random.exponential());
        clock.pass(next);
        let (row, runs) = pod(&mut random);
        clock.offer(row, runs);
    }
    clock.counted = false;
    clock.burst(completions.flood_percent, || pod(&mut random));
    clock.outcome.flooded_milli = clock.used_milli;
    Ok(clock.finish())
}

/// Simulate the pods at the times in the trace. Everything counts until the last pod has arrived.
///
/// # Errors
///
/// Fails if a pod has no times.
pub fn replay(trace: &Trace, ranks: &[u64], setting: impl Into<Setting>) -> Result<Turnover, Error> {
    let mut clock = ChurningCluster::new(trace, ranks, setting.into());
    let mut arrivals = Vec::with_capacity(trace.pods.len());
    for (row, pod) in trace.pods.iter().enumerate() {
        let times = pod.created.zip(pod.seconds).ok_or_else(|| no_time(trace, row))?;
        arrivals.push((times.0, row, times.1));
    }
    arrivals.sort_unstable();
    clock.counted = true;
    clock.now = arrivals.first().map_or(0, |(first, ..)| u128::from(*first));
    for (at, row, runs) in arrivals {
        clock.pass(u128::from(at));
        clock.offer(row, u128::from(runs));
    }
    Ok(clock.finish())
}

fn no_time(trace: &Trace, row: usize) -> Error {
    Error::NoTime {
        pod: trace.pods[row].name.clone(),
    }
}

impl Completions {
    /// Return the parameters of the published measurements: exponential lifetimes, 20,000 arrivals to warm up, and then 40,000
    /// arrivals that count.
    pub fn at(load_percent: u32, seed: u64) -> Completions {
        Completions {
            load_percent,
            lifetimes: Lifetimes::Exponential,
            fill_percent: 0,
            warm_up: 20_000,
            counted: 40_000,
            flood_percent: 0,
            seed,
        }
    }
}
