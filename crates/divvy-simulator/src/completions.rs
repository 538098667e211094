use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};

use divvy_policy::Decision;

use crate::random::Random;
use crate::setting::Nodes;
use crate::size::count;
use crate::{Error, Setting, Size, Tally, Trace};

/// Pods that come, run for a while and end; one that fits nowhere when it comes is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completions {
    /// GPU that is asked for, over what there is, in percent: what would be in use if nothing were ever lost.
    pub load_percent: u32,
    /// How long pods run.
    pub lifetimes: Lifetimes,
    /// Before anything else pods come all at once, until they have asked for so much of the cluster's GPU.
    pub fill_percent: u32,
    /// Arrivals before anything is counted.
    pub warm_up: u64,
    /// Arrivals that are counted.
    pub counted: u64,
    /// After all else pods come all at once again, until they have asked for so much of the cluster's GPU.
    pub flood_percent: u32,
    /// Of the random numbers.
    pub seed: u64,
}

/// How long pods run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Lifetimes {
    /// Exponentially distributed, whatever the pod.
    #[default]
    Exponential,
    /// In proportion to how long the pod was there in the trace.
    Trace,
}

/// What came of it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Turnover {
    /// Thousandths of GPUs times time in use while it was counted. Time is counted in 2^-32 of the mean time between arrivals, in
    /// [`replay`] in seconds.
    pub used: u128,
    /// The same if all GPUs had been in use.
    pub capacity: u128,
    /// Thousandths of GPUs that were asked for.
    pub asked_milli: u64,
    /// Of those, thousandths that fitted nowhere.
    pub lost_milli: u64,
    /// Pods that came, and those that were lost, by size.
    pub by_size: BTreeMap<Size, Tally>,
    /// Thousandths of GPUs in use after pods had come all at once at first.
    pub filled_milli: u64,
    /// Thousandths of GPUs in use after pods had come all at once in the end.
    pub flooded_milli: u64,
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

    /// All pods, and those that were lost.
    pub fn pods(&self) -> Tally {
        self.sum(|_| true)
    }

    /// Pods with 8 GPUs or more.
    pub fn large(&self) -> Tally {
        self.sum(|size| size >= Size::Whole(8))
    }

    fn sum(&self, which: impl Fn(Size) -> bool) -> Tally {
        let of_them = self.by_size.iter().filter(|(size, _)| which(**size));
        of_them.fold(Tally::default(), |sum, (_, tally)| Tally {
            asked: sum.asked + tally.asked,
            failed: sum.failed + tally.failed,
        })
    }
}

/// A cluster in which pods come and end.
struct Clock<'a> {
    trace: &'a Trace,
    nodes: Nodes,
    capacity: u128,
    /// When each ends, its number, its row, where it is.
    running: BinaryHeap<Reverse<(u128, u64, usize, Decision)>>,
    now: u128,
    used_milli: u64,
    arrivals: u64,
    counted: bool,
    outcome: Turnover,
}

impl<'a> Clock<'a> {
    fn new(trace: &'a Trace, ranks: &[u64], setting: Setting) -> Clock<'a> {
        Clock {
            trace,
            nodes: Nodes::new(setting, trace, ranks),
            capacity: u128::from(trace.capacity_milli()),
            running: BinaryHeap::new(),
            now: 0,
            used_milli: 0,
            arrivals: 0,
            counted: false,
            outcome: Turnover::default(),
        }
    }

    /// Time passes; who ends until then, ends.
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

    /// Time passes in which nothing happens.
    fn idle(&mut self, until: u128) {
        let used = (until - self.now) * u128::from(self.used_milli);
        self.outcome.used_in_all += used;
        if self.counted {
            self.outcome.used += used;
            self.outcome.capacity += (until - self.now) * self.capacity;
        }
        self.now = until;
    }

    /// A pod comes and is to run so long.
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

    /// Pods come all at once until they have asked for so much.
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
        // What still runs has not had all of its time.
        for Reverse((end, _, row, _)) in self.running {
            self.outcome.had -= (end - self.now) * u128::from(self.trace.pods[row].gpu_milli());
        }
        self.outcome
    }
}

/// Pods of the list come at random, each as likely as any other, in a Poisson stream.
///
/// # Errors
///
/// When the list asks for no GPU at all, or lifetimes of the trace are wanted and a pod has none.
pub fn turn_over(
    trace: &Trace,
    ranks: &[u64],
    setting: impl Into<Setting>,
    completions: &Completions,
) -> Result<Turnover, Error> {
    let mut clock = Clock::new(trace, ranks, setting.into());
    // A pod's life in mean times between arrivals is its own measure times this fraction, so that what runs asks for the load.
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
            // Every pod of the list has one: that was looked at.
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

/// Pods come and go when the trace says; all of it is counted, until the last one has come.
///
/// # Errors
///
/// When a pod has no times.
pub fn replay(trace: &Trace, ranks: &[u64], setting: impl Into<Setting>) -> Result<Turnover, Error> {
    let mut clock = Clock::new(trace, ranks, setting.into());
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
    /// As the published measurements were made: exponential lifetimes, 20,000 arrivals before 40,000 that count.
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
