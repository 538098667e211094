use std::fmt;

use divvy_model::{Error, MiB, PodKey};

/// When something happened, as far as the history says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// The resourceVersion of the change.
    pub revision: Option<u64>,
    /// Unix time in milliseconds, by the clock of the program that recorded the history.
    pub at_ms: Option<i64>,
}

/// What a finding means for the result of an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// A rule was broken.
    Fault,
    /// The history does not say whether a rule was broken.
    Doubt,
    /// Worth examining, but as far as this history goes, nothing is wrong.
    Note,
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Card {
    pub node: String,
    /// The NVML index.
    pub index: u32,
    /// NVML's UUID; `None` on a node of gpushare's device plugin.
    pub uuid: Option<String>,
}

impl fmt::Display for Card {
    /// Format the GPU as `GPU 0 of node n1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} of node {}", self.index, self.node)
    }
}

/// A pod and the memory that it has on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Share {
    pub pod: PodKey,
    pub uid: String,
    /// The memory that the pod has on the GPU.
    pub memory: MiB,
}

/// The pod that a finding is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Who {
    pub pod: PodKey,
    pub uid: String,
}

/// A finding of an audit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// When it was first seen.
    pub at: Moment,
    /// When it was over; `None` if it was not over when the history ended, or if it is not a condition that passes.
    pub until: Option<Moment>,
    /// What was found.
    pub what: What,
}

/// The kinds of findings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// Pods that were bound and had not ended were allocated more of a GPU than it has.
    Overcommitted {
        card: Card,
        /// The memory that the GPU offers.
        capacity: MiB,
        /// The most memory that was allocated at once.
        booked: MiB,
        /// The pods that it was allocated to, largest share first.
        by: Vec<Share>,
        /// Whether, by the pods' status, containers that together have more than the GPU ran at the same time. If not, it was
        /// only a promise on paper.
        ran: bool,
        /// Whether it began because the GPU offered less than before.
        shrunk: bool,
    },
    /// By the containers' own reports, more of a GPU was in use than it has.
    OvercommittedByReports {
        card: Card,
        /// The memory that the GPU offers.
        capacity: MiB,
        /// The most memory that was in use at once.
        used: MiB,
        /// The pods that used it, largest share first.
        by: Vec<Share>,
    },
    /// A pod was bound to memory that containers of a departed pod may still have held.
    GivenEarly {
        card: Card,
        /// The memory that the GPU offers.
        capacity: MiB,
        /// The memory allocated to existing pods, including the new one.
        booked: MiB,
        /// The memory that containers of departed pods had.
        held: MiB,
        /// The new pod.
        newcomer: Who,
    },
    /// A pod's allocation is not the one with which it was bound.
    AllocationChanged {
        who: Who,
        /// The allocation with which it was bound, in words.
        before: String,
        /// The allocation now, in words.
        after: String,
    },
    /// A pod has an allocation but no node, although only a Binding writes an allocation.
    AllocatedUnbound { who: Who },
    /// A pod that requests GPU memory was bound without an allocation.
    BoundWithoutAllocation {
        who: Who,
        /// The pod's node.
        node: String,
        /// The number of units that the pod requests.
        units: u64,
    },
    /// A pod's allocation cannot be read.
    Unreadable {
        who: Who,
        /// The pod's node.
        node: String,
        /// Why the allocation cannot be read.
        error: Error,
    },
    /// A pod's allocation names a GPU that its node never listed.
    NotOnNode {
        who: Who,
        /// The pod's node.
        node: String,
        /// The GPU's UUID or index.
        gpu: String,
        /// Another node that lists the GPU, if there is one.
        elsewhere: Option<String>,
    },
    /// A pod's allocation differs from its request.
    NotAsAsked {
        who: Who,
        /// The container whose share differs; `None` for the whole pod.
        container: Option<String>,
        /// The memory that is requested.
        asked: MiB,
        /// The memory that was allocated.
        allocated: MiB,
    },
    /// A pod was bound to a GPU that its node had reported as failed for some time.
    BoundToFailed {
        who: Who,
        card: Card,
        /// The reason of the failure, for example `XID 79`.
        reason: String,
        /// How long the node had reported the failure, in milliseconds.
        for_ms: i64,
    },
    /// A container reported another GPU or another node than its pod's allocation.
    RanElsewhere {
        who: Who,
        /// The container's name.
        container: String,
        /// The allocated GPUs, in words.
        allocated: String,
        /// Where the container ran, in words.
        found: String,
    },
    /// A container had a GPU, or its environment named one, although its pod has no allocation for it.
    RanWithoutAllocation {
        who: Who,
        /// The container's name.
        container: String,
        /// What the container had, in words.
        found: String,
    },
    /// A container's environment has a wrong size, or none.
    ToldWrong {
        who: Who,
        /// The container's name.
        container: String,
        /// The name of the environment variable.
        variable: &'static str,
        /// The value that was found; `None` if the variable was not set.
        found: Option<String>,
        /// The right value.
        expected: String,
    },
    /// `NVIDIA_VISIBLE_DEVICES` of a container with a grant is not `void`.
    NotVoid {
        who: Who,
        /// The container's name.
        container: String,
        /// The value that was found; `None` if the variable was not set.
        found: Option<String>,
    },
    /// Memory was held too long for containers whose pods are gone.
    HeldLong {
        card: Card,
        /// The memory that was held.
        held: MiB,
        /// How long it was held, in milliseconds.
        for_ms: i64,
    },
    /// Memory was held for containers whose pods are gone when the history ended.
    HeldNow {
        card: Card,
        /// The memory that was held.
        held: MiB,
    },
    /// A pod that should have been gone still exists and holds memory.
    StuckDeleting {
        who: Who,
        /// The pod's node.
        node: String,
        /// The memory that the pod holds.
        held: MiB,
        /// How long the pod should have been gone, in milliseconds.
        for_ms: i64,
    },
    /// A container ran although its pod had been gone or had ended for some time.
    OutlivedPod {
        who: Who,
        /// The container's name.
        container: String,
        /// How long the container outlived its pod, in milliseconds.
        for_ms: i64,
    },
    /// Nothing is known about what happened between two moments.
    Gap {
        /// The kind of objects: `pods` or `nodes`.
        of: &'static str,
        /// The reason, if it is known.
        why: Option<String>,
    },
    /// A list has no end, because the program that wrote it was stopped.
    ListUnfinished {
        /// The kind of objects: `pods` or `nodes`.
        of: &'static str,
    },
    /// Pods were allocated GPUs of a node about which the history says nothing.
    NodeUnknown {
        /// The node's name.
        node: String,
        /// The number of pods.
        pods: u64,
        /// Whether all nodes were listed and this one was not among them.
        gone: bool,
    },
    /// Containers reported, but the history says nothing about their pods.
    ReportsUnmatched {
        /// The number of containers.
        containers: u64,
    },
    /// A part of the input could not be read.
    NotRead {
        /// Which part, and what is wrong with it.
        text: String,
    },
}
