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

fn span(ms: i64) -> String {
    let seconds = ms / 1000;
    match seconds {
        ..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

fn shares(by: &[Share]) -> String {
    const SHOWN: usize = 8;
    let mut text: Vec<String> = by
        .iter()
        .take(SHOWN)
        .map(|share| format!("{} {}", share.pod, share.memory))
        .collect();
    if by.len() > SHOWN {
        text.push(format!("{} more", by.len() - SHOWN));
    }
    text.join(", ")
}

impl What {
    /// One word for programs; stable.
    pub fn id(&self) -> &'static str {
        match self {
            What::Overcommitted { ran: true, .. } => "gpu-overcommitted",
            What::Overcommitted { ran: false, .. } => "gpu-promised-twice",
            What::OvercommittedByReports { .. } => "gpu-overcommitted-by-reports",
            What::GivenEarly { .. } => "given-before-its-end-was-seen",
            What::AllocationChanged { .. } => "allocation-changed",
            What::AllocatedUnbound { .. } => "allocated-unbound",
            What::BoundWithoutAllocation { .. } => "bound-without-allocation",
            What::Unreadable { .. } => "allocation-unreadable",
            What::NotOnNode { .. } => "gpu-not-on-node",
            What::NotAsAsked { .. } => "allocation-not-as-asked",
            What::BoundToFailed { .. } => "bound-to-failed-gpu",
            What::RanElsewhere { .. } => "ran-elsewhere",
            What::RanWithoutAllocation { .. } => "ran-without-allocation",
            What::ToldWrong { .. } => "told-wrong",
            What::NotVoid { .. } => "not-void",
            What::HeldLong { .. } => "memory-held-long",
            What::HeldNow { .. } => "memory-held-now",
            What::StuckDeleting { .. } => "stuck-deleting",
            What::OutlivedPod { .. } => "container-outlived-pod",
            What::Gap { .. } => "history-gap",
            What::ListUnfinished { .. } => "list-unfinished",
            What::NodeUnknown { .. } => "node-unknown",
            What::ReportsUnmatched { .. } => "reports-unmatched",
            What::NotRead { .. } => "not-read",
        }
    }

    /// What it means for the answer.
    pub fn level(&self) -> Level {
        match self {
            What::GivenEarly { .. }
            | What::Gap { .. }
            | What::ListUnfinished { .. }
            | What::NodeUnknown { .. }
            | What::ReportsUnmatched { .. }
            | What::NotRead { .. } => Level::Doubt,
            What::HeldNow { .. } => Level::Note,
            _ => Level::Fault,
        }
    }

    /// Why it matters.
    pub fn matters(&self) -> &'static str {
        match self {
            What::Overcommitted { ran: true, .. } | What::OvercommittedByReports { .. } => {
                "programs that use all that they were given run out of memory, and which of them is chance"
            }
            What::Overcommitted { ran: false, .. } => {
                "on paper only: the node's agent starts no container for which there is no memory, so a pod waits on its node"
            }
            What::GivenEarly { .. } => {
                "the history does not say when the old containers ended; the node's agent holds the newcomer back until they have"
            }
            What::AllocationChanged { .. } => {
                "Divvy counts what the annotation says: memory that a running container has may be given to another pod"
            }
            What::AllocatedUnbound { .. } => {
                "only the extender writes allocations, with the binding; somebody else wrote this one"
            }
            What::BoundWithoutAllocation { .. } => {
                "its containers cannot start, and the kubelet counts its units as used: the scheduler did not ask the extender"
            }
            What::Unreadable { .. } => "it holds nothing in anybody's books, and its containers cannot start",
            What::NotOnNode { .. } => "its containers cannot start, and its memory is booked nowhere",
            What::NotAsAsked { .. } => "more or less is booked than its containers may use",
            What::BoundToFailed { .. } => "its containers cannot start until the GPU recovers",
            What::RanElsewhere { .. } => "it used memory that was promised to others",
            What::RanWithoutAllocation { .. } => "it could use a GPU that nobody counted",
            What::ToldWrong { .. } => "programs size themselves by it",
            What::NotVoid { .. } => "a default NVIDIA runtime would have given it every GPU that it names",
            What::HeldLong { .. } | What::HeldNow { .. } | What::StuckDeleting { .. } | What::OutlivedPod { .. } => {
                "nobody else gets this memory meanwhile"
            }
            What::Gap { .. } | What::ListUnfinished { .. } => "what happened then is not known; what was before and after it is",
            What::NodeUnknown { .. } => "whether its GPUs were given twice cannot be told without their sizes",
            What::ReportsUnmatched { .. } => "whether they ran on their pods' GPUs cannot be told",
            What::NotRead { .. } => "it may have said anything",
        }
    }

    /// What to do next: words, most of them a command.
    pub fn next(&self) -> String {
        let describe = |pod: &PodKey| format!("kubectl describe pod -n {} {}", pod.namespace, pod.name);
        let delete = |pod: &PodKey| format!("kubectl delete pod -n {} {}", pod.namespace, pod.name);
        match self {
            What::Overcommitted { by, .. } | What::OvercommittedByReports { by, .. } => match by.last() {
                Some(share) => format!(
                    "look at the node (divvy inspect gpushare -d), and delete a pod that is there too many: {}",
                    delete(&share.pod)
                ),
                None => "divvy inspect gpushare -d".to_owned(),
            },
            What::GivenEarly { newcomer, .. } => {
                format!(
                    "give the containers' own reports (--reports FILE), or see how it went: {}",
                    describe(&newcomer.pod)
                )
            }
            What::AllocationChanged { who, .. } | What::AllocatedUnbound { who } => format!(
                "find who wrote it (kubectl get pod -n {} {} -o yaml --show-managed-fields), install the admission policies (divvy manifests), and replace the pod: {}",
                who.pod.namespace,
                who.pod.name,
                delete(&who.pod)
            ),
            What::BoundWithoutAllocation { who, .. } => {
                format!(
                    "divvy scheduler-config --check says whether the scheduler asks; then {}",
                    delete(&who.pod)
                )
            }
            What::Unreadable { who, .. }
            | What::NotOnNode { who, .. }
            | What::NotAsAsked { who, .. }
            | What::BoundToFailed { who, .. } => {
                format!("{}, then {}", describe(&who.pod), delete(&who.pod))
            }
            What::RanElsewhere { who, .. } | What::RanWithoutAllocation { who, .. } => format!(
                "look on the node for another device plugin or a default NVIDIA runtime, then {}",
                delete(&who.pod)
            ),
            What::ToldWrong { who, .. } => format!("is the agent on the node older than the extender? Then {}", delete(&who.pod)),
            What::NotVoid { who, .. } => format!(
                "does the container's runtime apply CDI edits last? Look at its own environment: kubectl exec -n {} {} -- env",
                who.pod.namespace, who.pod.name
            ),
            What::HeldLong { card, .. } => format!(
                "on node {}: a container of a pod that is gone still runs; crictl ps shows it, crictl stop ends it",
                card.node
            ),
            What::HeldNow { .. } => "look again in a minute: divvy audit".to_owned(),
            What::StuckDeleting { who, node, .. } => {
                format!(
                    "does node {node} answer (kubectl get node {node})? A finalizer? {}",
                    describe(&who.pod)
                )
            }
            What::OutlivedPod { .. } => "on its node: crictl ps shows it, crictl stop ends it".to_owned(),
            What::Gap { .. } => "record near the API server, and leave the recorder running: divvy audit record FILE".to_owned(),
            What::ListUnfinished { .. } => "record again: divvy audit record FILE".to_owned(),
            What::NodeUnknown { .. } => {
                "give the nodes, too: kubectl get pods,nodes -A -o json, or divvy audit record FILE".to_owned()
            }
            What::ReportsUnmatched { .. } => "begin to record before the pods are made: divvy audit record FILE".to_owned(),
            What::NotRead { .. } => "look at the file there; is it whole?".to_owned(),
        }
    }
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            What::Overcommitted {
                card,
                capacity,
                booked,
                by,
                ran,
                shrunk,
            } => {
                write!(
                    f,
                    "{card} has {capacity} to give, and {booked} were allocated: {}",
                    shares(by)
                )?;
                f.write_str(match (ran, shrunk) {
                    (_, true) => "; it offered more before",
                    (true, false) => "; containers of all of it ran at once",
                    (false, false) => "; not all of these ran at once",
                })
            }
            What::OvercommittedByReports {
                card,
                capacity,
                used,
                by,
            } => write!(
                f,
                "{card} has {capacity} to give, and containers of {used} ran on it at once, by their own reports: {}",
                shares(by)
            ),
            What::GivenEarly {
                card,
                capacity,
                booked,
                held,
                newcomer,
            } => write!(
                f,
                "pod {} was bound to {card} while containers of vanished pods may still have had {held} of it ({booked} allocated, {capacity} in all)",
                newcomer.pod
            ),
            What::AllocationChanged { who, before, after } => write!(
                f,
                "the allocation of pod {} was changed after its binding: from {before} to {after}",
                who.pod
            ),
            What::AllocatedUnbound { who } => write!(f, "pod {} has an allocation and is bound to no node", who.pod),
            What::BoundWithoutAllocation { who, node, units } => write!(
                f,
                "pod {} asks for {units} units of GPU memory and was bound to node {node} without an allocation",
                who.pod
            ),
            What::Unreadable { who, node, error } => write!(f, "pod {} on node {node}: {error}", who.pod),
            What::NotOnNode {
                who,
                node,
                gpu,
                elsewhere,
            } => {
                write!(
                    f,
                    "pod {} on node {node} was allocated GPU {gpu}, which that node never listed",
                    who.pod
                )?;
                match elsewhere {
                    Some(other) => write!(f, "; node {other} does"),
                    None => Ok(()),
                }
            }
            What::NotAsAsked {
                who,
                container,
                asked,
                allocated,
            } => {
                if let Some(container) = container {
                    write!(f, "container {container} of ")?;
                }
                write!(f, "pod {} asks for {asked} and was allocated {allocated}", who.pod)
            }
            What::BoundToFailed {
                who,
                card,
                reason,
                for_ms,
            } => write!(
                f,
                "pod {} was bound to {card}, which its node had called failed ({reason}) for {}",
                who.pod,
                span(*for_ms)
            ),
            What::RanElsewhere {
                who,
                container,
                allocated,
                found,
            } => write!(
                f,
                "container {container} of pod {} was allocated {allocated} and ran with {found}",
                who.pod
            ),
            What::RanWithoutAllocation { who, container, found } => {
                write!(
                    f,
                    "container {container} of pod {} ran with {found} and was allocated nothing",
                    who.pod
                )
            }
            What::ToldWrong {
                who,
                container,
                variable,
                found,
                expected,
            } => write!(
                f,
                "container {container} of pod {} was told {variable}={}, and {expected} is right",
                who.pod,
                found.as_deref().unwrap_or("(not set)")
            ),
            What::NotVoid { who, container, found } => write!(
                f,
                "container {container} of pod {} ran with NVIDIA_VISIBLE_DEVICES={}, and void is right",
                who.pod,
                found.as_deref().unwrap_or("(not set)")
            ),
            What::HeldLong { card, held, for_ms } => write!(
                f,
                "{held} of {card} were held for {} by containers whose pods are gone",
                span(*for_ms)
            ),
            What::HeldNow { card, held } => write!(f, "{held} of {card} are held by containers whose pods are gone"),
            What::StuckDeleting { who, node, held, for_ms } => write!(
                f,
                "pod {} on node {node} should have been gone {} ago and still holds {held}",
                who.pod,
                span(*for_ms)
            ),
            What::OutlivedPod { who, container, for_ms } => write!(
                f,
                "container {container} of pod {} still ran {} after its pod had gone or ended",
                who.pod,
                span(*for_ms)
            ),
            What::Gap { of, why } => {
                write!(f, "nothing was seen of {of} for a while")?;
                match why {
                    Some(why) => write!(f, ": {why}"),
                    None => Ok(()),
                }
            }
            What::ListUnfinished { of } => write!(f, "a list of {of} has no end: who wrote it was stopped in the middle"),
            What::NodeUnknown { node, pods } => {
                write!(
                    f,
                    "{pods} pods were allocated GPUs of node {node}, of which nothing is known here"
                )
            }
            What::ReportsUnmatched { containers } => {
                write!(f, "{containers} containers reported of whose pods nothing is known here")
            }
            What::NotRead { text } => f.write_str(text),
        }
    }
}
