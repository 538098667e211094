//! The check whether the running scheduler calls the extender. It creates a pod that the extender always refuses with a message
//! that contains a random nonce, and looks for that message on the pod. The pod never runs, because the extender never binds it.

use divvy_host::plain_line;
use divvy_model::{Node, Pod, names};
use serde_json::{Value, json};

use crate::node_sums::sums;

/// The state of the check's pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SchedulerVerdict {
    /// The pod has the extender's message with the nonce. Only the scheduler can have copied the message from the extender's
    /// answer.
    Called {
        /// The pod's `spec.schedulerName`.
        scheduler: String,
    },
    /// The pod was bound, so the scheduler did not call the extender's filter, which would have refused the pod.
    Bound {
        /// The pod's `spec.schedulerName`.
        scheduler: String,
        /// The node to which the pod was bound.
        node: String,
        /// Whether the extender bound the pod. If so, the scheduler called the extender for bind, but not for filter.
        by_extender: bool,
    },
    /// The pod is neither refused by the extender nor bound.
    Waiting {
        /// The pod's `spec.schedulerName`.
        scheduler: String,
        /// The reason and the message of the condition PodScheduled, if it is False.
        said: Option<(String, String)>,
    },
}

/// Return the manifest of the check's pod. `nonce` consists of letters and digits.
pub fn pod(name: &str, namespace: &str, nonce: &str, scheduler: Option<&str>) -> Value {
    let mut pod = json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": namespace,
            "labels": {"app.kubernetes.io/managed-by": "divvy-scheduler-config"},
            "annotations": {divvy_extender::SCHEDULER_CHECK: nonce},
        },
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": false,
            // Tolerate all taints, so that the scheduler considers every node; the pod never runs there.
            "tolerations": [{"operator": "Exists"}],
            "securityContext": {"runAsNonRoot": true, "runAsUser": 65534, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "check",
                "image": "registry.k8s.io/pause:3.10",
                "resources": {"limits": {names::GPU_MEM: "1"}},
                "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
            }],
        },
    });
    if let Some(scheduler) = scheduler {
        pod["spec"]["schedulerName"] = scheduler.into();
    }
    pod
}

/// Report whether a node has a free unit for the check's pod. If not, the pod must not be created: the scheduler would not call
/// the extender, and might preempt pods of lower priority for this pod. (The pod itself cannot prevent preemption, because the
/// API server takes `preemptionPolicy` only from the PriorityClass.)
pub fn has_room(nodes: &[Node], pods: &[Pod]) -> bool {
    sums(nodes, pods).values().any(|sum| sum.free() > 0)
}

/// Return the text for a cluster that has no room for the check's pod, see [`has_room`].
pub fn no_room() -> String {
    format!("No node has a free unit of {}. {}", names::GPU_MEM, free_one())
}

fn free_one() -> String {
    format!(
        "The scheduler calls the extender only for nodes with enough free units in total. Free a unit, or add a GPU node, and check again. To see whether \
         the agents run: kubectl get nodes -o custom-columns='NODE:.metadata.name,GPU-MEM:.status.allocatable.{}'",
        names::GPU_MEM.replace('.', "\\.")
    )
}

/// Return the state of the check's pod.
pub fn verdict(pod: &Value, nonce: &str) -> SchedulerVerdict {
    let text = |path: &str| pod.pointer(path).and_then(Value::as_str).unwrap_or_default().to_owned();
    let scheduler = text("/spec/schedulerName");
    let conditions = pod
        .pointer("/status/conditions")
        .and_then(Value::as_array)
        .into_iter()
        .flatten();
    let said = conditions
        .filter(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False")
        .map(|condition| {
            let part = |name: &str| condition[name].as_str().unwrap_or_default().to_owned();
            (part("reason"), part("message"))
        })
        .next();
    if said.as_ref().is_some_and(|(_, message)| message.contains(nonce)) {
        return SchedulerVerdict::Called { scheduler };
    }
    let node = text("/spec/nodeName");
    if !node.is_empty() {
        let by_extender = pod
            .pointer("/metadata/annotations")
            .is_some_and(|annotations| annotations.get(names::ALLOCATION).is_some());
        return SchedulerVerdict::Bound {
            scheduler,
            node,
            by_extender,
        };
    }
    SchedulerVerdict::Waiting { scheduler, said }
}

/// Return the text for the user about a scheduler that did not call the extender's filter.
pub fn not_called(scheduler: &str, node: &str, by_extender: bool) -> String {
    if by_extender {
        return format!(
            "The scheduler {scheduler:?} let the extender bind the pod (to node {node}), but did not call its filter: Divvy's entry in its configuration \
             lacks filterVerb, or an older extender runs.\nUpdate the entry with divvy scheduler-config --merge FILE, and restart the scheduler."
        );
    }
    format!(
        "The scheduler {scheduler:?} bound the pod to node {node} without calling the extender: GPU pods start without a GPU, or not at all.\n\
         - Does its configuration contain Divvy's entry? Find the file that its argument --config names: \
         managedResources in that file must name {}.\n\
         - Was the scheduler restarted after the change? It reads the file only when it starts.\n\
         - Are there several control plane nodes? All need the change: another scheduler may hold the lease (kubectl -n kube-system get lease kube-scheduler).\n\
         divvy scheduler-config --for kubeadm (k3s, rke2, …) prints the steps. For a closed control plane, use --as-second-scheduler.",
        names::GPU_MEM
    )
}

/// Return the text for the user if the state of the pod proved nothing within the time limit.
pub fn unclear(scheduler: &str, said: Option<&(String, String)>, waited: &str) -> String {
    // The scheduler's texts come from the cluster, so make control characters harmless.
    let said = said.map(|(reason, message)| (plain_line(reason.chars()), plain_line(message.chars())));
    let Some((reason, message)) = said else {
        return format!(
            "After {waited} no scheduler had tried the pod. Check that a scheduler named {scheduler:?} (spec.schedulerName) exists and runs. \
             If it is busy or slow to start, use a longer --timeout."
        );
    };
    let why = if message.contains(&format!("Insufficient {}", names::GPU_MEM)) {
        free_one()
    } else if message.to_lowercase().contains("extender") || message.contains("http") || reason == "SchedulerError" {
        "The scheduler has a configured extender, and the call failed. Check that the address in its configuration (urlPrefix) is reachable from the \
         scheduler, and that it is the address of Divvy's extender of this version."
            .to_owned()
    } else {
        "The scheduler refused the pod before it called the extender. Check again when these reasons no longer apply.".to_owned()
    };
    format!("After {waited} the scheduler {scheduler:?} says ({reason}): {message}\n{why}")
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONCE: &str = "0f1e2d3c4b5a6978";

    fn seen(node: Option<&str>, allocation: bool, condition: Option<(&str, &str)>) -> Value {
        let mut seen = pod("divvy-scheduler-check-x", "default", NONCE, Some("default-scheduler"));
        if let Some(node) = node {
            seen["spec"]["nodeName"] = node.into();
        }
        if allocation {
            seen["metadata"]["annotations"][names::ALLOCATION] = "{}".into();
        }
        if let Some((reason, message)) = condition {
            seen["status"]["conditions"] =
                json!([{"type": "PodScheduled", "status": "False", "reason": reason, "message": message}]);
        }
        seen
    }

    #[test]
    fn a_schedulers_message_moves_no_cursor() {
        let said = ("Unsched\u{1b}[2J".to_owned(), "0/1 nodes\n\u{202e}are".to_owned());
        let text = unclear("s", Some(&said), "5 s");
        assert!(
            text.starts_with("After 5 s the scheduler \"s\" says (Unsched\\u{1b}[2J): 0/1 nodes\\u{a}\\u{202e}are\n"),
            "{text}"
        );
    }

    #[test]
    fn only_the_extenders_own_word_proves_that_it_was_called() {
        let check = |pod: Value, expected: SchedulerVerdict| assert_eq!(verdict(&pod, NONCE), expected);
        let scheduler = || "default-scheduler".to_owned();
        let word = divvy_extender::check_refusal(NONCE).expect("a nonce");
        check(
            seen(None, false, Some(("SchedulerError", &word))),
            SchedulerVerdict::Called { scheduler: scheduler() },
        );
        check(
            seen(
                None,
                false,
                Some(("Unschedulable", "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.")),
            ),
            SchedulerVerdict::Waiting {
                scheduler: scheduler(),
                said: Some((
                    "Unschedulable".to_owned(),
                    "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.".to_owned(),
                )),
            },
        );
        check(
            seen(None, false, None),
            SchedulerVerdict::Waiting {
                scheduler: scheduler(),
                said: None,
            },
        );
        for allocation in [false, true] {
            check(
                seen(Some("n1"), allocation, None),
                SchedulerVerdict::Bound {
                    scheduler: scheduler(),
                    node: "n1".to_owned(),
                    by_extender: allocation,
                },
            );
        }
        // Every copy of the pod has the nonce in its annotation, which proves nothing.
        assert!(matches!(
            verdict(&seen(None, false, None), NONCE),
            SchedulerVerdict::Waiting { .. }
        ));
    }

    #[test]
    fn what_is_unclear_is_explained_by_what_the_scheduler_says() {
        let check = |said: Option<(&str, &str)>, part: &str| {
            let said = said.map(|(reason, message)| (reason.to_owned(), message.to_owned()));
            let text = unclear("default-scheduler", said.as_ref(), "30 s");
            assert!(text.contains(part), "{text}");
        };
        check(None, "Check that a scheduler named \"default-scheduler\"");
        check(
            Some(("Unschedulable", "0/3 nodes are available: 3 Insufficient aliyun.com/gpu-mem.")),
            "only for nodes with enough free units in total",
        );
        check(
            Some((
                "SchedulerError",
                "Post \"http://127.0.0.1:32766/gpushare-scheduler/filter\": dial tcp: connection refused",
            )),
            "reachable from the scheduler",
        );
        check(
            Some(("Unschedulable", "0/1 nodes are available: 1 node(s) were unschedulable.")),
            "before it called the extender",
        );
    }
}
