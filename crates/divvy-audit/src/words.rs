use std::fmt;

use divvy_model::PodKey;

use super::finding::{Card, Level, Share, What};

/// `10 min 3 s`
pub fn span(ms: i64) -> String {
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
    /// The GPU that it is about.
    pub fn card(&self) -> Option<&Card> {
        match self {
            What::Overcommitted { card, .. }
            | What::OvercommittedByReports { card, .. }
            | What::GivenEarly { card, .. }
            | What::BoundToFailed { card, .. }
            | What::HeldLong { card, .. }
            | What::HeldNow { card, .. } => Some(card),
            _ => None,
        }
    }

    /// Name and UID of the pods that it is about.
    pub fn pods(&self) -> Vec<(&PodKey, &str)> {
        match self {
            What::Overcommitted { by, .. } | What::OvercommittedByReports { by, .. } => {
                by.iter().map(|share| (&share.pod, share.uid.as_str())).collect()
            }
            What::GivenEarly { newcomer: who, .. }
            | What::AllocationChanged { who, .. }
            | What::AllocatedUnbound { who }
            | What::BoundWithoutAllocation { who, .. }
            | What::Unreadable { who, .. }
            | What::NotOnNode { who, .. }
            | What::NotAsAsked { who, .. }
            | What::BoundToFailed { who, .. }
            | What::RanElsewhere { who, .. }
            | What::RanWithoutAllocation { who, .. }
            | What::ToldWrong { who, .. }
            | What::NotVoid { who, .. }
            | What::StuckDeleting { who, .. }
            | What::OutlivedPod { who, .. } => vec![(&who.pod, who.uid.as_str())],
            _ => Vec::new(),
        }
    }

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
                "find who wrote it (kubectl get pod -n {} {} -o yaml --show-managed-fields), install the admission policies (Helm: policies.enabled=true), and replace the pod: {}",
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
            What::NodeUnknown { node, gone: true, .. } => format!(
                "Kubernetes deletes pods of a node that is gone; which are left: kubectl get pods -A --field-selector spec.nodeName={node}"
            ),
            What::NodeUnknown { gone: false, .. } => {
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
            What::NodeUnknown { node, pods, gone } => {
                let (pods, were) = match pods {
                    1 => ("1 pod".to_owned(), "was"),
                    _ => (format!("{pods} pods"), "were"),
                };
                let why = match gone {
                    true => "which does not exist (any more)",
                    false => "of which nothing is known here",
                };
                write!(f, "{pods} {were} allocated GPUs of node {node}, {why}")
            }
            What::ReportsUnmatched { containers } => {
                write!(f, "{containers} containers reported of whose pods nothing is known here")
            }
            What::NotRead { text } => f.write_str(text),
        }
    }
}
