//! Which node, and which of its GPUs: the policies, on a description of nodes that holds nothing but numbers.
//!
//! The extender and the simulator run these same functions; [`from_ledger`] describes the extender's nodes in these terms. All decisions are
//! made in integers, so they are the same on every machine.
//!
//! - [`Shape`], [`Free`]: what a node has when it is empty, and what is left
//! - [`Demand`]: what a pod asks for; [`Mix`]: how often which is asked for
//! - [`Policy`]: the policies by name
//! - [`Placer`]: nodes under a policy; decides, and keeps what it found out
//! - [`Fleet`]: a ledger's nodes in a placer, kept up to date

#![forbid(unsafe_code)]

mod baselines;
mod demand;
mod divvy;
mod fgd;
mod fleet;
mod fragmentation;
mod fragments;
mod mapping;
mod mix;
mod mixer;
mod placer;
mod rf;
mod rule;
mod slots;
mod spread;
mod state;

use std::fmt;
use std::str::FromStr;

pub use demand::{Demand, Model, ModelSet, Models, Share};
pub use divvy_placement::hash::rank;
pub use fleet::{Fleet, Offer, Ranking};
pub use fragmentation::Fragmentation;
pub use mapping::{GpuGroup, demand_of, from_ledger};
pub use mix::Mix;
pub use placer::{Cost, Decision, NodeId, Placer};
use rule::Rule;
use state::State;
pub use state::{Free, GpuSet, MOST_GPUS, Shape};

/// A part of what a place costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Term {
    /// What it is.
    pub name: &'static str,
    /// How much, in thousandths of a GPU; less than nothing is good.
    pub milli: i64,
}

/// How much a [`Placer`] remembers. What it forgets it finds out again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Costs of nodes for classes of pods, of about 60 bytes each.
    pub costs: usize,
    /// What is stranded on a node in some state, of about 200 bytes each.
    pub states: usize,
    /// Classes of pods that are learnt: the most frequent.
    pub classes: usize,
    /// Kinds of GPUs, by product and size, that a [`Fleet`] has an opinion on. Tables are kept for each, of a size that goes with the classes.
    pub kinds: usize,
    /// Somebody waits for each answer: a decision looks at few states that it does not know, also while a cluster fills up.
    pub hurry: bool,
}

impl Default for Limits {
    /// For a program that does nothing else: at most about 300 MiB.
    fn default() -> Limits {
        Limits {
            costs: 1 << 20,
            states: 1 << 20,
            classes: 4096,
            kinds: Models::MOST,
            hurry: false,
        }
    }
}

impl Limits {
    /// For a server of 5,000 nodes that is to stay small: at most about 40 MiB.
    pub const SMALL: Limits = Limits {
        costs: 1 << 18,
        states: 1 << 16,
        classes: 128,
        kinds: 32,
        hurry: true,
    };
}

/// A policy for placement.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// Any node that fits, any GPU that fits: by a hash of the pod's number and the node's rank.
    Random,
    /// The node with the least CPU and GPU left; within it the GPU with the least left, as gpushare does.
    BestFit,
    /// The smallest product of what is asked for and what is left (Tetris, SIGCOMM 2014).
    DotProduct,
    /// GPUs in use, then free GPUs of nodes in use, then free nodes (MLaaS, NSDI 2022).
    GpuPacking,
    /// The emptiest GPU, of equals the one on the node with the most GPU left: for those who would rather share with nobody.
    Spread,
    /// Pods of one size beside pods of the same size (Gandiva, OSDI 2018).
    GpuClustering,
    /// Fragmentation Gradient Descent (USENIX ATC 2023), to the last rounding.
    Fgd,
    /// FGD's fragments, places that are lost, and a price for scarce products (research/fgd.md section 3).
    Rf,
    /// Divvy's own: expected stranding, scarcity and slot pressure, from what it saw arrive. The default.
    #[default]
    Divvy,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 9] = [
        Policy::Random,
        Policy::BestFit,
        Policy::Spread,
        Policy::DotProduct,
        Policy::GpuPacking,
        Policy::GpuClustering,
        Policy::Fgd,
        Policy::Rf,
        Policy::Divvy,
    ];

    /// As users write it.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Random => "random",
            Policy::BestFit => "best-fit",
            Policy::Spread => "spread",
            Policy::DotProduct => "dot-prod",
            Policy::GpuPacking => "gpu-packing",
            Policy::GpuClustering => "gpu-clustering",
            Policy::Fgd => "fgd",
            Policy::Rf => "rf",
            Policy::Divvy => "divvy",
        }
    }

    fn rule(self, limits: Limits) -> Box<dyn Rule> {
        match self {
            // Random does not ask it.
            Policy::Random | Policy::BestFit => Box::new(baselines::BestFit),
            Policy::Spread => Box::new(spread::Spread),
            Policy::DotProduct => Box::new(baselines::DotProduct),
            Policy::GpuPacking => Box::new(baselines::GpuPacking),
            Policy::GpuClustering => Box::new(baselines::GpuClustering),
            Policy::Fgd => Box::new(fgd::Fgd::new()),
            Policy::Rf => Box::new(rf::Rf::default()),
            Policy::Divvy => Box::new(divvy::Divvy::new(limits)),
        }
    }
}

impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// No policy has this name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownPolicy(String);

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Policy::ALL.map(Policy::name).join(", ");
        write!(f, "there is no policy {:?}; the policies are {names}", self.0)
    }
}

impl std::error::Error for UnknownPolicy {}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Policy, UnknownPolicy> {
        let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
