use std::fmt;

use divvy_model::{Error, MiB, PodKey};

/// When something was: as far as the history says so.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// resourceVersion of the change.
    pub revision: Option<u64>,
    /// Unix time in milliseconds by the clock of whoever wrote the history down.
    pub at_ms: Option<i64>,
}

/// What a finding means for the answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// Something that must not be was.
    Fault,
    /// It cannot be told whether something was that must not be.
    Doubt,
    /// Worth a look; nothing is wrong as far as this history goes.
    Note,
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    /// The node.
    pub node: String,
    /// NVML index.
    pub index: u32,
    /// NVML's UUID; `None` on a node of gpushare's plugin.
    pub uuid: Option<String>,
}

impl fmt::Display for Card {
    /// `GPU 0 of node n1`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} of node {}", self.index, self.node)
    }
}

/// A pod and what it has on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    /// The pod.
    pub pod: PodKey,
    /// Its UID.
    pub uid: String,
    /// What it has.
    pub memory: MiB,
}

/// A pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    /// The pod.
    pub pod: PodKey,
    /// Its UID.
    pub uid: String,
}

/// Something that the audit has to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// When it was first seen.
    pub at: Moment,
    /// When it had passed; `None` if it had not when the history ended, or if it is no state that passes.
    pub until: Option<Moment>,
    /// What it is.
    pub what: What,
}

/// What an audit can find.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Pods that had been bound and had not ended were allocated more of a GPU than it has.
    Overcommitted {
        /// The GPU.
        card: Card,
        /// What it has to give.
        capacity: MiB,
        /// The most that was allocated at once.
        booked: MiB,
        /// By whom, the largest share first.
        by: Vec<Share>,
        /// Containers of pods that have more than the GPU has ran at the same time, by the pods' status. Else it was a promise on
        /// paper only.
        ran: bool,
        /// It began with the GPU offering less than before.
        shrunk: bool,
    },
    /// By the containers' own reports more of a GPU was in use than it has.
    OvercommittedByReports {
        /// The GPU.
        card: Card,
        /// What it has to give.
        capacity: MiB,
        /// The most that was in use at once.
        used: MiB,
        /// By whom, the largest share first.
        by: Vec<Share>,
    },
    /// A pod was bound to memory that containers of a vanished pod may still have had.
    GivenEarly {
        /// The GPU.
        card: Card,
        /// What it has to give.
        capacity: MiB,
        /// What pods that are there were allocated, the newcomer among them.
        booked: MiB,
        /// What containers of vanished pods had.
        held: MiB,
        /// The newcomer.
        newcomer: Who,
    },
    /// A pod's allocation is not the one that it was bound with.
    AllocationChanged {
        /// The pod.
        who: Who,
        /// What it was bound with, in words.
        before: String,
        /// What it says now.
        after: String,
    },
    /// A pod has an allocation and no node: nobody but the Binding writes one.
    AllocatedUnbound {
        /// The pod.
        who: Who,
    },
    /// A pod that asks for GPU memory was bound without an allocation.
    BoundWithoutAllocation {
        /// The pod.
        who: Who,
        /// Its node.
        node: String,
        /// Units that it asks for.
        units: u64,
    },
    /// A pod's allocation cannot be read.
    Unreadable {
        /// The pod.
        who: Who,
        /// Its node.
        node: String,
        /// What is wrong.
        error: Error,
    },
    /// A pod's allocation names a GPU that its node never listed.
    NotOnNode {
        /// The pod.
        who: Who,
        /// Its node.
        node: String,
        /// UUID or index.
        gpu: String,
        /// The node that lists it.
        elsewhere: Option<String>,
    },
    /// A pod's allocation is not what it asks for.
    NotAsAsked {
        /// The pod.
        who: Who,
        /// The container whose share it is; `None` for the whole pod.
        container: Option<String>,
        /// What it asks for.
        asked: MiB,
        /// What it was allocated.
        allocated: MiB,
    },
    /// A pod was bound to a GPU that its node had called failed for some time.
    BoundToFailed {
        /// The pod.
        who: Who,
        /// The GPU.
        card: Card,
        /// `XID 79`
        reason: String,
        /// For how long its node had said so.
        for_ms: i64,
    },
    /// A container reported another GPU than its pod's allocation, or another node.
    RanElsewhere {
        /// The pod.
        who: Who,
        /// The container.
        container: String,
        /// Where it was allocated, in words.
        allocated: String,
        /// Where it was.
        found: String,
    },
    /// A container had a GPU, or was told of one, and its pod has no allocation for it.
    RanWithoutAllocation {
        /// The pod.
        who: Who,
        /// The container.
        container: String,
        /// What it had.
        found: String,
    },
    /// A container was told another size, or nothing.
    ToldWrong {
        /// The pod.
        who: Who,
        /// The container.
        container: String,
        /// The variable.
        variable: &'static str,
        /// What it was.
        found: Option<String>,
        /// What it should have been.
        expected: String,
    },
    /// `NVIDIA_VISIBLE_DEVICES` of a container with a grant is not `void`.
    NotVoid {
        /// The pod.
        who: Who,
        /// The container.
        container: String,
        /// What it was.
        found: Option<String>,
    },
    /// Memory is held for containers whose pods are gone, for too long.
    HeldLong {
        /// The GPU.
        card: Card,
        /// How much.
        held: MiB,
        /// For how long.
        for_ms: i64,
    },
    /// Memory is held for containers whose pods are gone, at the end of the history.
    HeldNow {
        /// The GPU.
        card: Card,
        /// How much.
        held: MiB,
    },
    /// A pod that was deleted is still there, with its memory.
    StuckDeleting {
        /// The pod.
        who: Who,
        /// Its node.
        node: String,
        /// What it holds.
        held: MiB,
        /// For how long it should have been gone.
        for_ms: i64,
    },
    /// A container ran though its pod had gone or ended some time ago.
    OutlivedPod {
        /// The pod.
        who: Who,
        /// The container.
        container: String,
        /// For how long.
        for_ms: i64,
    },
    /// Nothing is known of what happened between two moments.
    Gap {
        /// `pods` or `nodes`.
        of: &'static str,
        /// Why, where that is known.
        why: Option<String>,
    },
    /// A list has no end: who wrote it was stopped.
    ListUnfinished {
        /// `pods` or `nodes`.
        of: &'static str,
    },
    /// Pods were allocated GPUs of a node of which the history says nothing.
    NodeUnknown {
        /// The node.
        node: String,
        /// How many pods.
        pods: u64,
        /// All nodes were listed, and it was not among them.
        gone: bool,
    },
    /// Containers reported, of whose pods the history says nothing.
    ReportsUnmatched {
        /// How many containers.
        containers: u64,
    },
    /// Some of what was given could not be read.
    NotRead {
        /// What, and what is wrong.
        text: String,
    },
}
