//! Which runs there are, and one of them.

use divvy_policy::Policy;
use divvy_simulator::{
    Choice, Completions, Error, Inflation, Lifetimes, Order, Setting, Trace, Turnover, inflate, replay, turn_over,
};

/// How pods come and go.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flow {
    /// They come and never end, in these orders.
    Fill(Vec<Numbered<Arrival>>),
    /// They come at random and end: at each of these loads, in percent.
    TurnOver {
        /// In percent.
        loads: Vec<u32>,
        /// How long they run.
        lifetimes: Lifetimes,
        /// Arrivals before anything is counted.
        warm_up: u64,
        /// Arrivals that are counted.
        counted: u64,
        /// Of the random numbers.
        seeds: Vec<u64>,
    },
    /// They come and end when the list says.
    Replay,
}

/// A thing and the seed that it belongs to, if any.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbered<T> {
    /// The seed.
    pub seed: Option<u64>,
    /// The thing.
    pub of: T,
}

/// Where an order comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Arrival {
    /// It was read.
    Read(Order),
    /// It is made from this seed, until so much of the cluster's GPU is asked for, in percent.
    Shuffled {
        /// The seed.
        seed: u64,
        /// How much is asked for.
        percent: u32,
    },
}

/// Policies side by side on one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Study {
    /// Nodes and pods.
    pub trace: Trace,
    /// Each once.
    pub policies: Vec<Policy>,
    /// How pods come and go.
    pub flow: Flow,
    /// Ranks in place of an order's own.
    pub ranks: Option<Vec<u64>>,
    /// Arrivals that a policy may learn from.
    pub history: Option<u64>,
    /// Whether fragmentation is measured.
    pub fragments: bool,
    /// How a policy's opinion becomes a node.
    pub choice: Choice,
}

/// One run to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Job {
    /// Under which policy.
    pub policy: Policy,
    /// At which load, in percent.
    pub load: Option<u32>,
    /// With which seed.
    pub seed: Option<u64>,
    /// Which of [`Flow::Fill`]'s orders.
    order: usize,
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// Of pods that only came.
    Filled(Inflation),
    /// Of pods that ended, too.
    TurnedOver(Turnover),
}

/// A run that was made.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// What was to be run.
    pub job: Job,
    /// What came of it.
    pub outcome: Outcome,
}

impl Study {
    /// Fails before anything is run where nothing could come of it.
    ///
    /// # Errors
    ///
    /// When no node has a GPU, or no pod asks for one.
    pub fn check(&self) -> Result<(), Error> {
        if self.trace.capacity_milli() == 0 {
            return Err(Error::NoGpuNode);
        }
        if self.trace.pods.iter().all(|pod| pod.gpu_milli() == 0) {
            return Err(Error::NoGpu);
        }
        Ok(())
    }

    /// All runs, in the order in which they are told.
    pub fn jobs(&self) -> Vec<Job> {
        let mut jobs = Vec::new();
        for &policy in &self.policies {
            let mut add = |load, seed, order| {
                jobs.push(Job {
                    policy,
                    load,
                    seed,
                    order,
                });
            };
            match &self.flow {
                Flow::Fill(orders) => (0..orders.len()).for_each(|order| add(None, orders[order].seed, order)),
                Flow::TurnOver { loads, seeds, .. } => {
                    let all = loads.iter().flat_map(|load| seeds.iter().map(move |seed| (*load, *seed)));
                    all.for_each(|(load, seed)| add(Some(load), Some(seed), 0));
                }
                Flow::Replay => add(None, None, 0),
            }
        }
        jobs
    }

    /// Makes one run. A function of the study and the job: the same wherever and whenever it is made.
    ///
    /// # Errors
    ///
    /// When the trace lacks what the run needs.
    pub fn run(&self, job: Job) -> Result<Run, Error> {
        let setting = Setting {
            learn_from: self.history,
            fragments: self.fragments,
            choice: self.choice,
            ..Setting::from(job.policy)
        };
        let ranks = || self.ranks.clone().unwrap_or_else(|| Order::ranks_by_name(&self.trace));
        let outcome = match &self.flow {
            Flow::Fill(orders) => {
                let mut order = match &orders[job.order].of {
                    Arrival::Read(order) => order.clone(),
                    Arrival::Shuffled { seed, percent } => Order::shuffled(&self.trace, *seed, *percent),
                };
                if let Some(ranks) = &self.ranks {
                    order.ranks.clone_from(ranks);
                }
                Outcome::Filled(inflate(&self.trace, &order, setting))
            }
            Flow::TurnOver {
                lifetimes,
                warm_up,
                counted,
                ..
            } => {
                let completions = Completions {
                    lifetimes: *lifetimes,
                    warm_up: *warm_up,
                    counted: *counted,
                    ..Completions::at(job.load.unwrap_or(0), job.seed.unwrap_or(0))
                };
                Outcome::TurnedOver(turn_over(&self.trace, &ranks(), setting, &completions)?)
            }
            Flow::Replay => Outcome::TurnedOver(replay(&self.trace, &ranks(), setting)?),
        };
        Ok(Run { job, outcome })
    }
}
