//! The runs of a study, and the execution of a single run.

use divvy_policy::Policy;
use divvy_simulator::{
    Completions, Error, Inflation, Lifetimes, NodeChoice, Order, Setting, Trace, Turnover, inflate, replay, turn_over,
};

/// The way in which pods arrive and end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Flow {
    /// Pods arrive in these orders and never end.
    Fill(Vec<Numbered<ArrivalOrder>>),
    /// Pods arrive at random and end.
    TurnOver {
        /// The loads, in percent of the cluster's GPUs. There is one run for each combination of a load and a seed.
        loads: Vec<u32>,
        /// How long pods run.
        lifetimes: Lifetimes,
        /// The number of arrivals before the counted ones.
        warm_up: u64,
        /// The number of arrivals to count.
        counted: u64,
        /// The seeds of the random number generator.
        seeds: Vec<u64>,
    },
    /// Pods arrive and end at the times in the list.
    Replay,
}

/// A value and its seed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Numbered<T> {
    /// The seed, if the value has one.
    pub seed: Option<u64>,
    /// The value.
    pub of: T,
}

/// The source of an order in which pods arrive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArrivalOrder {
    /// The order was read from a file.
    Read(Order),
    /// The order is generated from a seed.
    Shuffled {
        /// The seed.
        seed: u64,
        /// The length of the order. It ends when the requests add up to this percentage of the cluster's GPUs.
        percent: u32,
    },
}

/// A comparison of policies on one trace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Study {
    /// The nodes and the pods.
    pub trace: Trace,
    /// The policies, without duplicates.
    pub policies: Vec<Policy>,
    /// The way in which pods arrive and end.
    pub flow: Flow,
    /// The ranks of the nodes. With `None`, each order of pods has its own ranks, and runs without an order use
    /// [`Order::ranks_by_name`].
    pub ranks: Option<Vec<u64>>,
    /// The number of arrivals from which a policy may learn the usual requests. `None` means all arrivals.
    pub history: Option<u64>,
    /// The way in which a node is chosen once the policy has computed the costs.
    pub choice: NodeChoice,
}

/// A run to be made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StudyJob {
    /// The policy of the run.
    pub policy: Policy,
    /// The load in percent, for [`Flow::TurnOver`].
    pub load: Option<u32>,
    /// The seed, if the run has one.
    pub seed: Option<u64>,
    /// The index of the order in [`Flow::Fill`].
    order: usize,
}

/// The outcome of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StudyOutcome {
    /// The outcome of a run in which pods never end.
    Filled(Inflation),
    /// The outcome of a run in which pods end.
    TurnedOver(Turnover),
}

/// A finished run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StudyRun {
    /// The job of the run.
    pub job: StudyJob,
    /// The outcome of the run.
    pub outcome: StudyOutcome,
}

impl Study {
    /// Check that this study can be run.
    ///
    /// # Errors
    ///
    /// Fails if no node has a GPU, or if no pod requests a GPU.
    pub fn check(&self) -> Result<(), Error> {
        if self.trace.capacity_milli() == 0 {
            return Err(Error::NoGpuNode);
        }
        if self.trace.pods.iter().all(|pod| pod.gpu_milli() == 0) {
            return Err(Error::NoGpu);
        }
        Ok(())
    }

    /// Return all jobs, in the order of the output: by policy, load, and seed.
    pub fn jobs(&self) -> Vec<StudyJob> {
        let mut jobs = Vec::new();
        for &policy in &self.policies {
            let mut add = |load, seed, order| {
                jobs.push(StudyJob {
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

    /// Make one run. The result depends only on the study and the job.
    ///
    /// # Errors
    ///
    /// Fails if the trace lacks data that the run needs.
    pub fn run(&self, job: StudyJob) -> Result<StudyRun, Error> {
        let setting = Setting {
            learn_from: self.history,
            choice: self.choice,
            ..Setting::from(job.policy)
        };
        let ranks = || self.ranks.clone().unwrap_or_else(|| Order::ranks_by_name(&self.trace));
        let outcome = match &self.flow {
            Flow::Fill(orders) => {
                let mut order = match &orders[job.order].of {
                    ArrivalOrder::Read(order) => order.clone(),
                    ArrivalOrder::Shuffled { seed, percent } => Order::shuffled(&self.trace, *seed, *percent),
                };
                if let Some(ranks) = &self.ranks {
                    order.ranks.clone_from(ranks);
                }
                StudyOutcome::Filled(inflate(&self.trace, &order, setting))
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
                StudyOutcome::TurnedOver(turn_over(&self.trace, &ranks(), setting, &completions)?)
            }
            Flow::Replay => StudyOutcome::TurnedOver(replay(&self.trace, &ranks(), setting)?),
        };
        Ok(StudyRun { job, outcome })
    }
}
