use std::fmt;

use divvy_model::{Error, MiB, PodKey};

/// When something happened, as far as the history tells.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment {
    /// The resourceVersion of the change.
    pub revision: Option<u64>,
    /// Unix time in milliseconds, by the clock of the program that recorded the history.
    pub at_ms: Option<i64>,
}

/// What a finding means for the result of an audit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FindingLevel {
    /// A rule was broken.
    Fault,
    /// The history does not say whether a rule was broken.
    Doubt,
    /// Something worth examining, although this history shows nothing wrong.
    Note,
}

/// A GPU of a node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AuditedCard {
    pub node: String,
    /// The NVML index.
    pub index: u32,
    /// NVML's UUID; `None` on a node of gpushare's device plugin.
    pub uuid: Option<String>,
}

impl fmt::Display for AuditedCard {
    /// Format the GPU as `GPU 0 of node n1`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GPU {} of node {}", self.index, self.node)
    }
}

/// A pod and the memory that it has on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PodMemory {
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
    /// When the condition was first seen.
    pub at: Moment,
    /// When the condition was over. `None` if it still lasted when the history ended, or if the finding is an event and not a
    /// condition.
    pub until: Option<Moment>,
    /// What was found.
    pub what: FindingKind,
}

/// The kinds of findings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FindingKind {
    /// Pods that were bound and had not ended were together allocated more memory of a GPU than it has.
    Overcommitted {
        card: AuditedCard,
        /// The memory that the GPU offers.
        capacity: MiB,
        /// The largest amount of memory that was allocated at one time.
        booked: MiB,
        /// The pods to which that memory was allocated, largest share first.
        by: Vec<PodMemory>,
        /// Whether the overcommitted memory was really used. If true, then according to the pods' status, containers whose
        /// shares together exceed the GPU ran at the same time. If false, the memory was overcommitted only on paper.
        ran: bool,
        /// Whether the overcommitment began because the GPU offered less memory than before.
        shrunk: bool,
    },
    /// According to the containers' own reports, more memory of a GPU was in use than it has.
    OvercommittedByReports {
        card: AuditedCard,
        /// The memory that the GPU offers.
        capacity: MiB,
        /// The largest amount of memory that was in use at one time.
        used: MiB,
        /// The pods that used that memory, largest share first.
        by: Vec<PodMemory>,
    },
    /// A pod was bound to memory that containers of a departed pod may still have been using.
    GivenEarly {
        card: AuditedCard,
        /// The memory that the GPU offers.
        capacity: MiB,
        /// The memory allocated to existing pods, including the new one.
        booked: MiB,
        /// The memory that containers of departed pods had.
        held: MiB,
        /// The new pod.
        newcomer: Who,
    },
    /// A pod's allocation has changed since the pod was bound.
    AllocationChanged {
        who: Who,
        /// The allocation when the pod was bound, in words.
        before: String,
        /// The allocation after the change, in words.
        after: String,
    },
    /// A pod has an allocation but no node, although an allocation is only ever written together with a Binding.
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
        card: AuditedCard,
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
    /// A container had a GPU, or its environment named one, although its pod has no allocation for the container.
    RanWithoutAllocation {
        who: Who,
        /// The container's name.
        container: String,
        /// What the container had, in words.
        found: String,
    },
    /// An environment variable with a memory size for the container has a wrong value or is not set.
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
    /// Memory was held too long for containers whose pods no longer exist.
    HeldLong {
        card: AuditedCard,
        /// The memory that was held.
        held: MiB,
        /// How long it was held, in milliseconds.
        for_ms: i64,
    },
    /// Memory was still held when the history ended, for containers whose pods no longer exist.
    HeldNow {
        card: AuditedCard,
        /// The memory that was held.
        held: MiB,
    },
    /// A pod still exists and holds memory, although its deletion should be complete.
    StuckDeleting {
        who: Who,
        /// The pod's node.
        node: String,
        /// The memory that the pod holds.
        held: MiB,
        /// How long ago the pod's deletion should have been complete, in milliseconds.
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
    /// The end of a list is missing.
    ListUnfinished {
        /// The kind of objects: `pods` or `nodes`.
        of: &'static str,
    },
    /// Pods were allocated GPUs of a node that does not occur in the history.
    NodeUnknown {
        /// The node's name.
        node: String,
        /// The number of pods.
        pods: u64,
        /// Whether all nodes were listed and this one was not among them.
        gone: bool,
    },
    /// Containers reported, but their pods do not occur in the history.
    ReportsUnmatched {
        /// The number of containers.
        containers: u64,
    },
}
