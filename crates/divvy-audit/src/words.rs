use std::fmt;

use divvy_model::PodKey;

use super::finding::{AuditedCard, FindingKind, FindingLevel, PodMemory, Who};

/// Format a duration in milliseconds, rounded down to seconds: `10 min 3 s`.
fn span(ms: i64) -> String {
    let seconds = ms / 1000;
    match seconds {
        ..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {} s", seconds / 60, seconds % 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

fn shares(by: &[PodMemory]) -> String {
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

impl FindingKind {
    /// Return the GPU that the finding is about; `None` if it is not about one GPU, or if only a history can have it.
    pub fn card(&self) -> Option<&AuditedCard> {
        match self {
            FindingKind::Overcommitted { card, .. } | FindingKind::HeldLong { card, .. } | FindingKind::HeldNow { card, .. } => {
                Some(card)
            }
            _ => None,
        }
    }

    /// Return the names and UIDs of the pods that the finding is about; none if only a history can have it.
    pub fn pods(&self) -> Vec<(&PodKey, &str)> {
        match self {
            FindingKind::Overcommitted { by, .. } => by.iter().map(|share| (&share.pod, share.uid.as_str())).collect(),
            FindingKind::AllocatedUnbound { who }
            | FindingKind::BoundWithoutAllocation { who, .. }
            | FindingKind::Unreadable { who, .. }
            | FindingKind::NotOnNode { who, .. }
            | FindingKind::NotAsAsked { who, .. }
            | FindingKind::StuckDeleting { who, .. } => vec![(&who.pod, who.uid.as_str())],
            _ => Vec::new(),
        }
    }

    /// Return a stable identifier for programs: lowercase words joined by hyphens.
    pub fn id(&self) -> &'static str {
        match self {
            FindingKind::Overcommitted { ran: true, .. } => "gpu-overcommitted",
            FindingKind::Overcommitted { ran: false, .. } => "gpu-promised-twice",
            FindingKind::OvercommittedByReports { .. } => "gpu-overcommitted-by-reports",
            FindingKind::GivenEarly { .. } => "given-before-its-end-was-seen",
            FindingKind::AllocationChanged { .. } => "allocation-changed",
            FindingKind::AllocatedUnbound { .. } => "allocated-unbound",
            FindingKind::BoundWithoutAllocation { .. } => "bound-without-allocation",
            FindingKind::Unreadable { .. } => "allocation-unreadable",
            FindingKind::NotOnNode { .. } => "gpu-not-on-node",
            FindingKind::NotAsAsked { .. } => "allocation-not-as-asked",
            FindingKind::BoundToFailed { .. } => "bound-to-failed-gpu",
            FindingKind::RanElsewhere { .. } => "ran-elsewhere",
            FindingKind::RanWithoutAllocation { .. } => "ran-without-allocation",
            FindingKind::ToldWrong { .. } => "told-wrong",
            FindingKind::NotVoid { .. } => "not-void",
            FindingKind::HeldLong { .. } => "memory-held-long",
            FindingKind::HeldNow { .. } => "memory-held-now",
            FindingKind::StuckDeleting { .. } => "stuck-deleting",
            FindingKind::OutlivedPod { .. } => "container-outlived-pod",
            FindingKind::Gap { .. } => "history-gap",
            FindingKind::ListUnfinished { .. } => "list-unfinished",
            FindingKind::NodeUnknown { .. } => "node-unknown",
            FindingKind::ReportsUnmatched { .. } => "reports-unmatched",
        }
    }

    /// Return how serious the finding is.
    pub fn level(&self) -> FindingLevel {
        match self {
            FindingKind::GivenEarly { .. }
            | FindingKind::Gap { .. }
            | FindingKind::ListUnfinished { .. }
            | FindingKind::NodeUnknown { .. }
            | FindingKind::ReportsUnmatched { .. } => FindingLevel::Doubt,
            FindingKind::HeldNow { .. } => FindingLevel::Note,
            _ => FindingLevel::Fault,
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
            FindingKind::Overcommitted { ran, by, .. } => (
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
            FindingKind::AllocatedUnbound { who } => (
                "only the extender writes allocations, together with the Binding; another client wrote this one",
                format!(
                    "find who wrote it (kubectl get pod -n {} {} -o yaml --show-managed-fields), install the admission policies (Helm: policies.enabled=true), and replace the pod: {}",
                    who.pod.namespace,
                    who.pod.name,
                    delete(&who.pod)
                ),
            ),
            FindingKind::BoundWithoutAllocation { who, .. } => (
                "its containers cannot start, and the kubelet counts its units as used: the scheduler did not call the extender",
                format!(
                    "check that the scheduler calls the extender (divvy scheduler-config --check), then {}",
                    delete(&who.pod)
                ),
            ),
            FindingKind::Unreadable { who, .. } => (
                "no memory is counted for it, and its containers cannot start",
                describe_and_delete(who),
            ),
            FindingKind::NotOnNode { who, .. } => (
                "its containers cannot start, and its memory is not counted anywhere",
                describe_and_delete(who),
            ),
            FindingKind::NotAsAsked { who, .. } => (
                "Divvy counts more or less memory than its containers may use",
                describe_and_delete(who),
            ),
            FindingKind::HeldLong { card, .. } => (
                blocked,
                format!(
                    "on node {}, find the container of the deleted pod (crictl ps) and end it (crictl stop)",
                    card.node
                ),
            ),
            FindingKind::HeldNow { .. } => (blocked, "run the audit again in a minute: divvy audit".to_owned()),
            FindingKind::StuckDeleting { who, node, .. } => (
                blocked,
                format!(
                    "check that node {node} is ready (kubectl get node {node}) and that no finalizer keeps the pod: {}",
                    describe(&who.pod)
                ),
            ),
            FindingKind::NodeUnknown { node, .. } => (
                "without the sizes of its GPUs, the audit cannot tell whether memory was given twice",
                format!(
                    "Kubernetes deletes the pods of a deleted node; list those that are left: kubectl get pods -A --field-selector spec.nodeName={node}"
                ),
            ),
            _ => return None,
        })
    }
}

impl fmt::Display for FindingKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FindingKind::Overcommitted {
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
            FindingKind::OvercommittedByReports {
                card,
                capacity,
                used,
                by,
            } => write!(
                f,
                "{card} offers {capacity}, and containers with {used} ran on it at once, by their own reports: {}",
                shares(by)
            ),
            FindingKind::GivenEarly {
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
            FindingKind::AllocationChanged { who, before, after } => write!(
                f,
                "the allocation of pod {} was changed after its binding: from {before} to {after}",
                who.pod
            ),
            FindingKind::AllocatedUnbound { who } => write!(f, "pod {} has an allocation but is not bound to a node", who.pod),
            FindingKind::BoundWithoutAllocation { who, node, units } => write!(
                f,
                "pod {} asks for {units} units of GPU memory and was bound to node {node} without an allocation",
                who.pod
            ),
            FindingKind::Unreadable { who, node, error } => write!(f, "pod {} on node {node}: {error}", who.pod),
            FindingKind::NotOnNode {
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
            FindingKind::NotAsAsked {
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
            FindingKind::BoundToFailed {
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
            FindingKind::RanElsewhere {
                who,
                container,
                allocated,
                found,
            } => write!(
                f,
                "container {container} of pod {} was allocated {allocated} and ran with {found}",
                who.pod
            ),
            FindingKind::RanWithoutAllocation { who, container, found } => {
                write!(
                    f,
                    "container {container} of pod {} ran with {found}, but nothing was allocated to it",
                    who.pod
                )
            }
            FindingKind::ToldWrong {
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
            FindingKind::NotVoid { who, container, found } => write!(
                f,
                "container {container} of pod {} ran with NVIDIA_VISIBLE_DEVICES={}; the right value is void",
                who.pod,
                found.as_deref().unwrap_or("(not set)")
            ),
            FindingKind::HeldLong { card, held, for_ms } => write!(
                f,
                "{held} of {card} were held for {} by containers whose pods are gone",
                span(*for_ms)
            ),
            FindingKind::HeldNow { card, held } => write!(f, "{held} of {card} are held by containers whose pods are gone"),
            FindingKind::StuckDeleting { who, node, held, for_ms } => write!(
                f,
                "pod {} on node {node} should have been gone {} ago and still holds {held}",
                who.pod,
                span(*for_ms)
            ),
            FindingKind::OutlivedPod { who, container, for_ms } => write!(
                f,
                "container {container} of pod {} still ran {} after its pod was deleted or had ended",
                who.pod,
                span(*for_ms)
            ),
            FindingKind::Gap { of, why } => {
                write!(f, "changes of {of} were not recorded for a while")?;
                match why {
                    Some(why) => write!(f, ": {why}"),
                    None => Ok(()),
                }
            }
            FindingKind::ListUnfinished { of } => write!(f, "a list of {of} has no end"),
            FindingKind::NodeUnknown { node, pods, gone } => {
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
            FindingKind::ReportsUnmatched { containers } => {
                write!(
                    f,
                    "{containers} containers reported, and the history says nothing about their pods"
                )
            }
        }
    }
}
