//! Does the running scheduler call the extender? A pod that the extender refuses with a word of its own, and what is to be seen on
//! it. The pod never runs: the extender binds it nowhere.

use divvy_host::plain_line;
use divvy_model::{Node, Pod, names};
use serde_json::{Value, json};

use crate::sums::sums;

/// What can be seen on the pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// The extender's own word is on the pod: only the scheduler can have carried it there.
    Called {
        /// `spec.schedulerName`.
        scheduler: String,
    },
    /// It was bound, which the extender's filter would have refused.
    Bound {
        /// `spec.schedulerName`.
        scheduler: String,
        /// The node.
        node: String,
        /// Whether the extender bound it: then filter alone was not called.
        by_extender: bool,
    },
    /// Neither yet.
    Waiting {
        /// `spec.schedulerName`.
        scheduler: String,
        /// Reason and message of the condition PodScheduled.
        said: Option<(String, String)>,
    },
}

/// The pod of the check. `nonce`: letters and digits.
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
            // A node is looked at whatever its taints: it is not to run there.
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

/// Whether some node's sum of free units takes the pod. Where none does it is not even created: the scheduler would not come to ask the
/// extender, but might push out pods of lower priority for it (a pod cannot forbid that itself: the API server takes `preemptionPolicy`
/// from its PriorityClass only).
pub fn has_room(nodes: &[Node], pods: &[Pod]) -> bool {
    sums(nodes, pods).values().any(|sum| sum.free() > 0)
}

/// What is said where [`has_room`] is not so.
pub fn no_room() -> String {
    format!("No node has a free unit of {}. {}", names::GPU_MEM, free_one())
}

fn free_one() -> String {
    format!(
        "The scheduler asks the extender only about nodes whose sum still fits. Free a unit, or add a GPU node (does its agent run? kubectl get nodes \
         -o custom-columns='NODE:.metadata.name,GPU-MEM:.status.allocatable.{}'), and check again.",
        names::GPU_MEM.replace('.', "\\.")
    )
}

/// What the pod shows.
pub fn verdict(pod: &Value, nonce: &str) -> Verdict {
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
        return Verdict::Called { scheduler };
    }
    let node = text("/spec/nodeName");
    if !node.is_empty() {
        let by_extender = pod
            .pointer("/metadata/annotations")
            .is_some_and(|annotations| annotations.get(names::ALLOCATION).is_some());
        return Verdict::Bound {
            scheduler,
            node,
            by_extender,
        };
    }
    Verdict::Waiting { scheduler, said }
}

/// What a person should know of a scheduler that did not ask.
pub fn not_called(scheduler: &str, node: &str, by_extender: bool) -> String {
    if by_extender {
        return format!(
            "The scheduler {scheduler:?} let the extender bind the pod (to node {node}), but did not ask its filter: in its configuration Divvy's entry \
             lacks filterVerb, or an older extender runs.\nWrite the entry anew: divvy scheduler-config --merge FILE, and restart the scheduler."
        );
    }
    format!(
        "The scheduler {scheduler:?} bound the pod to node {node} without asking the extender: GPU pods start without a GPU, or not at all.\n\
         - Has it a configuration with Divvy's entry? Look for --config among its arguments, and into that file: \
         managedResources must name {}.\n\
         - Was it restarted since? It reads the file at its start only.\n\
         - On several control planes: on all of them? Another scheduler may hold the lease (kubectl -n kube-system get lease kube-scheduler).\n\
         divvy scheduler-config --for kubeadm (k3s, rke2, …) prints what to do; --as-second-scheduler where the control plane is closed.",
        names::GPU_MEM
    )
}

/// What a person should know where nothing was to be seen in time.
pub fn unclear(scheduler: &str, said: Option<&(String, String)>, waited: &str) -> String {
    // What the scheduler wrote into the cluster.
    let said = said.map(|(reason, message)| (plain_line(reason.chars()), plain_line(message.chars())));
    let Some((reason, message)) = said else {
        return format!(
            "After {waited} no scheduler had looked at the pod. Is there one named {scheduler:?} (spec.schedulerName), and does it run? \
             If it is busy or slow to start, give --timeout."
        );
    };
    let why = if message.contains(&format!("Insufficient {}", names::GPU_MEM)) {
        free_one()
    } else if message.to_lowercase().contains("extender") || message.contains("http") || reason == "SchedulerError" {
        "The scheduler has an extender configured, and the call failed: is the address in its configuration (urlPrefix) reachable from where the \
         scheduler runs, and is the extender Divvy's, of this version?"
            .to_owned()
    } else {
        "The pod was refused before the extender's turn. If these reasons pass, check again.".to_owned()
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
        let check = |pod: Value, expected: Verdict| assert_eq!(verdict(&pod, NONCE), expected);
        let scheduler = || "default-scheduler".to_owned();
        let word = divvy_extender::check_refusal(NONCE).expect("a nonce");
        check(
            seen(None, false, Some(("SchedulerError", &word))),
            Verdict::Called { scheduler: scheduler() },
        );
        check(
            seen(
                None,
                false,
                Some(("Unschedulable", "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.")),
            ),
            Verdict::Waiting {
                scheduler: scheduler(),
                said: Some((
                    "Unschedulable".to_owned(),
                    "0/1 nodes are available: 1 Insufficient aliyun.com/gpu-mem.".to_owned(),
                )),
            },
        );
        check(
            seen(None, false, None),
            Verdict::Waiting {
                scheduler: scheduler(),
                said: None,
            },
        );
        for allocation in [false, true] {
            check(
                seen(Some("n1"), allocation, None),
                Verdict::Bound {
                    scheduler: scheduler(),
                    node: "n1".to_owned(),
                    by_extender: allocation,
                },
            );
        }
        // The nonce of the annotation itself is on every copy of the pod and proves nothing.
        assert!(matches!(verdict(&seen(None, false, None), NONCE), Verdict::Waiting { .. }));
    }

    #[test]
    fn what_is_unclear_is_explained_by_what_the_scheduler_says() {
        let check = |said: Option<(&str, &str)>, part: &str| {
            let said = said.map(|(reason, message)| (reason.to_owned(), message.to_owned()));
            let text = unclear("default-scheduler", said.as_ref(), "30 s");
            assert!(text.contains(part), "{text}");
        };
        check(None, "Is there one named \"default-scheduler\"");
        check(
            Some(("Unschedulable", "0/3 nodes are available: 3 Insufficient aliyun.com/gpu-mem.")),
            "only about nodes whose sum still fits",
        );
        check(
            Some((
                "SchedulerError",
                "Post \"http://127.0.0.1:32766/gpushare-scheduler/filter\": dial tcp: connection refused",
            )),
            "reachable from where the scheduler runs",
        );
        check(
            Some(("Unschedulable", "0/1 nodes are available: 1 node(s) were unschedulable.")),
            "before the extender's turn",
        );
    }
}
