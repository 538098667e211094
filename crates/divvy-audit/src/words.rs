use std::fmt;

use divvy_model::PodKey;

use super::finding::{Card, Level, Share, What, Who};

/// Format a duration in milliseconds, rounded down to seconds: `10 min 3 s`.
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
    /// Return the GPU that the finding is about; `None` if it is not about one GPU, or if only a history can have it.
    pub fn card(&self) -> Option<&Card> {
        match self {
            What::Overcommitted { card, .. } | What::HeldLong { card, .. } | What::HeldNow { card, .. } => Some(card),
            _ => None,
        }
    }

    /// Return the names and UIDs of the pods that the finding is about; none if only a history can have it.
    pub fn pods(&self) -> Vec<(&PodKey, &str)> {
        match self {
            What::Overcommitted { by, .. } => by.iter().map(|share| (&share.pod, share.uid.as_str())).collect(),
            What::AllocatedUnbound { who }
            | What::BoundWithoutAllocation { who, .. }
            | What::Unreadable { who, .. }
            | What::NotOnNode { who, .. }
            | What::NotAsAsked { who, .. }
            | What::StuckDeleting { who, .. } => vec![(&who.pod, who.uid.as_str())],
            _ => Vec::new(),
        }
    }

    /// Return a stable identifier for programs: lowercase words joined by hyphens.
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
        }
    }

    /// Return how serious the finding is.
    pub fn level(&self) -> Level {
        match self {
            What::GivenEarly { .. }
            | What::Gap { .. }
            | What::ListUnfinished { .. }
            | What::NodeUnknown { .. }
            | What::ReportsUnmatched { .. } => Level::Doubt,
            What::HeldNow { .. } => Level::Note,
            _ => Level::Fault,
        }
    }

    /// Return why the finding matters, as a clause without a full stop, and what to do next, as a sentence, most often with a command. `None` for findings
    /// that only a history can have: users see the present state.
    pub fn advice(&self) -> Option<(&'static str, String)> {
        let describe = |pod: &PodKey| format!("kubectl describe pod -n {} {}", pod.namespace, pod.name);
        let delete = |pod: &PodKey| format!("kubectl delete pod -n {} {}", pod.namespace, pod.name);
        let describe_and_delete = |who: &Who| format!("{}, then {}", describe(&who.pod), delete(&who.pod));
        let blocked = "no other pod gets this memory in the meantime";
        Some(match self {
            What::Overcommitted { ran, by, .. } => (
                if *ran {
                    "programs that use all of their memory run out of it, and which of them fails is a matter of chance"
                } else {
                    "on paper only: the node's agent does not start a container without free memory for it, so a pod that is bound to the node does not start \
                         until memory is free"
                },
                match by.last() {
                    Some(share) => format!(
                        "look at the node (divvy inspect gpushare -d), and delete a pod, so that the others fit: {}",
                        delete(&share.pod)
                    ),
                    None => "divvy inspect gpushare -d".to_owned(),
                },
            ),
            What::AllocatedUnbound { who } => (
                "only the extender writes allocations, together with the Binding; another client wrote this one",
                format!(
                    "find who wrote it (kubectl get pod -n {} {} -o yaml --show-managed-fields), install the admission policies (Helm: policies.enabled=true), and replace the pod: {}",
                    who.pod.namespace,
                    who.pod.name,
                    delete(&who.pod)
                ),
            ),
            What::BoundWithoutAllocation { who, .. } => (
                "its containers cannot start, and the kubelet counts its units as used: the scheduler did not call the extender",
                format!(
                    "check that the scheduler calls the extender (divvy scheduler-config --check), then {}",
                    delete(&who.pod)
                ),
            ),
            What::Unreadable { who, .. } => (
                "no memory is counted for it, and its containers cannot start",
                describe_and_delete(who),
            ),
            What::NotOnNode { who, .. } => (
                "its containers cannot start, and its memory is not counted anywhere",
                describe_and_delete(who),
            ),
            What::NotAsAsked { who, .. } => (
                "Divvy counts more or less memory than its containers may use",
                describe_and_delete(who),
            ),
            What::HeldLong { card, .. } => (
                blocked,
                format!(
                    "on node {}, find the container of the deleted pod (crictl ps) and end it (crictl stop)",
                    card.node
                ),
            ),
            What::HeldNow { .. } => (blocked, "run the audit again in a minute: divvy audit".to_owned()),
            What::StuckDeleting { who, node, .. } => (
                blocked,
                format!(
                    "check that node {node} is ready (kubectl get node {node}) and that no finalizer keeps the pod: {}",
                    describe(&who.pod)
                ),
            ),
            What::NodeUnknown { node, .. } => (
                "without the sizes of its GPUs, the audit cannot tell whether memory was given twice",
                format!(
                    "Kubernetes deletes the pods of a deleted node; list those that are left: kubectl get pods -A --field-selector spec.nodeName={node}"
                ),
            ),
            _ => return None,
        })
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
                write!(f, "{card} offers {capacity}, and {booked} were allocated: {}", shares(by))?;
                f.write_str(match (ran, shrunk) {
                    (_, true) => "; it offered more before",
                    (true, false) => "; containers with all of this memory ran at once",
                    (false, false) => "; not all of their containers ran at once",
                })
            }
            What::OvercommittedByReports {
                card,
                capacity,
                used,
                by,
            } => write!(
                f,
                "{card} offers {capacity}, and containers with {used} ran on it at once, by their own reports: {}",
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
                "pod {} was bound to {card} while containers of deleted pods may still have held {held} of it ({booked} allocated, {capacity} in all)",
                newcomer.pod
            ),
            What::AllocationChanged { who, before, after } => write!(
                f,
                "the allocation of pod {} was changed after its binding: from {before} to {after}",
                who.pod
            ),
            What::AllocatedUnbound { who } => write!(f, "pod {} has an allocation but is not bound to a node", who.pod),
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
                    "container {container} of pod {} ran with {found}, but nothing was allocated to it",
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
                "container {container} of pod {} ran with {variable}={}; the right value is {expected}",
                who.pod,
                found.as_deref().unwrap_or("(not set)")
            ),
            What::NotVoid { who, container, found } => write!(
                f,
                "container {container} of pod {} ran with NVIDIA_VISIBLE_DEVICES={}; the right value is void",
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
                "container {container} of pod {} still ran {} after its pod was deleted or had ended",
                who.pod,
                span(*for_ms)
            ),
            What::Gap { of, why } => {
                write!(f, "changes of {of} were not recorded for a while")?;
                match why {
                    Some(why) => write!(f, ": {why}"),
                    None => Ok(()),
                }
            }
            What::ListUnfinished { of } => write!(f, "a list of {of} has no end"),
            What::NodeUnknown { node, pods, gone } => {
                let (pods, were) = match pods {
                    1 => ("1 pod".to_owned(), "was"),
                    _ => (format!("{pods} pods"), "were"),
                };
                let why = if *gone {
                    "which does not exist, or no longer exists"
                } else {
                    "about which the history says nothing"
                };
                write!(f, "{pods} {were} allocated GPUs of node {node}, {why}")
            }
            What::ReportsUnmatched { containers } => {
                write!(
                    f,
                    "{containers} containers reported, and the history says nothing about their pods"
                )
            }
        }
    }
}
