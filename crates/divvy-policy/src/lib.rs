//! The placement policies: they choose a node for a pod, and GPUs of that node. They work on a numeric description of the nodes.
//!
//! The extender and the simulator run the same functions; [`from_ledger`] translates the extender's nodes into this description.
//! All decisions use only integers, so they are the same on every machine.
//!
//! - [`NodeShape`], [`FreeOnNode`]: what a node has when it is empty, and what is free on it now
//! - [`Demand`]: what a pod requests; [`Mix`]: how often each kind of request occurs
//! - [`Policy`]: the policies by name
//! - [`Placer`]: the nodes that a policy places pods on; it decides, and caches computed costs
//! - [`Fleet`]: a ledger's nodes in a placer, kept up to date

#![forbid(unsafe_code)]

mod baselines;
mod demand;
mod divvy;
mod fgd;
mod fleet;
mod fragments;
mod mapping;
mod mix;
mod mixer;
mod model;
mod placer;
mod ranking;
mod rf;
mod rule;
mod shape;
mod slots;
mod spread;
mod state;
mod whole;

use std::fmt;
use std::str::FromStr;

pub use demand::{Demand, DemandShare};
pub use divvy_placement::hash::rank;
pub use fleet::{Fleet, PlacementOffer};
pub use mapping::{GpuGroup, demand_of, from_ledger};
pub use mix::Mix;
pub use model::{Model, ModelSet, Models};
pub use placer::{Cost, Decision, NodeId, Placer};
pub use ranking::Ranking;
use rule::CostRule;
pub use shape::{MOST_GPUS, NodeShape};
use state::PolicyNodeState;
pub use state::{FreeOnNode, GpuSet};

/// One term of a placement's cost, for display.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostTerm {
    /// The term's name: `stranding`, `scarcity`, or `slot pressure`.
    pub name: &'static str,
    /// The cost in thousandths of a GPU; a negative number is a gain.
    pub milli: i64,
}

/// How much a [`Placer`] caches. Dropped entries are computed again when they are needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CacheLimits {
    /// The number of cached costs, one per class of pods and node state; about 60 bytes each.
    pub costs: usize,
    /// The number of node states for which the stranded amount is cached; about 200 bytes each.
    pub states: usize,
    /// The maximum number of classes of pods that are learned. Only the most frequent ones are kept.
    pub classes: usize,
    /// The maximum number of kinds of nodes (by GPU product, GPU size, and rough CPU size) that a [`Fleet`] ranks. Each kind
    /// needs tables whose size grows with the number of classes.
    pub kinds: usize,
    /// Whether a caller waits for each answer. If so, a decision evaluates only a few unknown states, even while a cluster fills
    /// up.
    pub hurry: bool,
}

impl Default for CacheLimits {
    /// Return the limits for a program that does nothing else: at most about 300 MiB.
    fn default() -> CacheLimits {
        CacheLimits {
            costs: 1 << 20,
            states: 1 << 20,
            classes: 4096,
            kinds: Models::MOST,
            hurry: false,
        }
    }
}

impl CacheLimits {
    /// The limits for a server that must stay small in a cluster of 5,000 nodes: at most about 40 MiB.
    pub const SMALL: CacheLimits = CacheLimits {
        costs: 1 << 18,
        states: 1 << 16,
        classes: 128,
        kinds: 32,
        hurry: true,
    };
}

/// A placement policy.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Policy {
    /// Any GPU that fits on any node that fits, chosen by a hash of the pod's number and the node's rank.
    Random,
    /// The node with the least free CPU and GPU memory; within the node, the GPU with the least free memory, as in gpushare.
    BestFit,
    /// The node with the smallest dot product of the request and the free amounts (Tetris, SIGCOMM 2014).
    DotProduct,
    /// First GPUs in use, then free GPUs of nodes in use, then free nodes (MLaaS, NSDI 2022).
    GpuPacking,
    /// The emptiest GPU; on a tie, the node with the most free GPU memory. This is for users whose pods should share a GPU as
    /// little as possible.
    Spread,
    /// The node that already runs pods of the same size (Gandiva, OSDI 2018).
    GpuClustering,
    /// Fragmentation Gradient Descent (USENIX ATC 2023), exact to the last rounding.
    Fgd,
    /// FGD's fragments, plus the places that each class of pods loses, plus a price for scarce products (the module `rf`).
    Rf,
    /// Divvy's own policy, the default: expected stranding, scarcity, and slot pressure, learned from the pods that have arrived
    /// (the module `divvy`).
    #[default]
    Divvy,
}

impl Policy {
    /// All policies, in the order in which documents and error messages list them.
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

    /// The policies for a real cluster. The others come from the literature; the simulator uses them for comparison.
    pub const FOR_SCHEDULING: [Policy; 3] = [Policy::Divvy, Policy::BestFit, Policy::Spread];

    /// Parse the name of a policy for a real cluster.
    ///
    /// # Errors
    /// Fails if the name is not one of [`Policy::FOR_SCHEDULING`].
    pub fn for_scheduling(name: &str) -> Result<Policy, NotForScheduling> {
        match name.parse::<Policy>() {
            Ok(policy) if Policy::FOR_SCHEDULING.contains(&policy) => Ok(policy),
            Ok(policy) => Err(NotForScheduling::OnlySimulated(policy)),
            Err(_) => Err(NotForScheduling::Unknown(name.to_owned())),
        }
    }

    /// Return the name that users write, for example `best-fit`.
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

    fn rule(self, limits: CacheLimits) -> Box<dyn CostRule> {
        match self {
            // The policy `random` does not use its rule.
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

/// The error for an unknown name of a policy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UnknownPolicy(String);

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = Policy::ALL.map(Policy::name).join(", ");
        write!(f, "there is no policy {:?}; the policies are {names}", self.0)
    }
}

impl std::error::Error for UnknownPolicy {}

/// Why a name is not that of a policy for a real cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NotForScheduling {
    /// The policy comes from the literature.
    OnlySimulated(Policy),
    /// There is no such policy.
    Unknown(String),
}

impl fmt::Display for NotForScheduling {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NotForScheduling::OnlySimulated(policy) => {
                write!(f, "{policy} is a policy from the literature, for divvy simulate only")?;
            }
            NotForScheduling::Unknown(name) => write!(f, "there is no policy {name:?}")?,
        }
        f.write_str("; write divvy, best-fit, or spread")
    }
}

impl std::error::Error for NotForScheduling {}

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Policy, UnknownPolicy> {
        let found = Policy::ALL.into_iter().find(|policy| policy.name() == name);
        found.ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
