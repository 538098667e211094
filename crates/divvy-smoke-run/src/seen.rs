//! What a pod's object says about the test.

use serde_json::Value;

/// The reasons of a waiting container that do not pass on their own (the kubelet's `pkg/kubelet/images/types.go` and
/// `pkg/kubelet/kuberuntime/kuberuntime_container.go`).
const STUCK: [&str; 9] = [
    "ErrImagePull",
    "ImagePullBackOff",
    "ErrImageNeverPull",
    "InvalidImageName",
    "ImageInspectError",
    "RegistryUnavailable",
    "CreateContainerConfigError",
    "CreateContainerError",
    "RunContainerError",
];
/// The number of characters of a message that are kept.
const MESSAGE: usize = 1000;

/// The state of a pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TestPodState {
    /// No node was found yet; what the scheduler says.
    Unscheduled(Option<String>),
    /// The pod has a node, and its container does not run yet. The text says what does not pass on its own.
    Starting(Option<String>),
    /// The container runs.
    Running,
    /// The container ended.
    Ended {
        /// The exit status; `None` if the container never ran.
        status: Option<i64>,
        /// Why it ended, if it is more than the status: `OOMKilled`, or the kubelet's refusal.
        reason: Option<String>,
        /// The termination message, which the container wrote.
        message: Option<String>,
    },
}

impl TestPodState {
    /// Read a pod's object.
    pub fn of(pod: &Value) -> TestPodState {
        let status = &pod["status"];
        let state = &status["containerStatuses"][0]["state"];
        // Of the container that copies the program, if there is one.
        let before = &status["initContainerStatuses"][0]["state"];
        let said = |of: &Value| {
            let parts = [text(&of["reason"]), text(&of["message"])];
            let parts: Vec<String> = parts.into_iter().flatten().collect();
            (!parts.is_empty()).then(|| parts.join(": "))
        };
        let has_ended = matches!(status["phase"].as_str(), Some("Succeeded" | "Failed"));
        let terminated = &state["terminated"];
        let copied = &before["terminated"];
        if has_ended && copied["exitCode"].as_i64().is_some_and(|status| status != 0) {
            let why = said(copied).unwrap_or_default();
            return TestPodState::Ended {
                status: None,
                reason: Some(format!("the program could not be copied from Divvy's image: {why}")),
                message: None,
            };
        }
        if has_ended || terminated.is_object() {
            let of_container = text(&terminated["reason"]).filter(|reason| !matches!(reason.as_str(), "Completed" | "Error"));
            return TestPodState::Ended {
                status: terminated["exitCode"].as_i64(),
                reason: said(status).or(of_container),
                message: terminated["message"].as_str().map(str::to_owned),
            };
        }
        if state["running"].is_object() {
            return TestPodState::Running;
        }
        if pod["spec"]["nodeName"].as_str().is_none_or(str::is_empty) {
            let conditions = status["conditions"].as_array().into_iter().flatten();
            let scheduled = conditions.filter(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False");
            return TestPodState::Unscheduled(scheduled.filter_map(|condition| text(&condition["message"])).next());
        }
        let waiting = match &before["waiting"] {
            Value::Null => &state["waiting"],
            waiting => waiting,
        };
        let is_stuck = waiting["reason"].as_str().is_some_and(|reason| STUCK.contains(&reason));
        TestPodState::Starting(said(waiting).filter(|_| is_stuck))
    }
}

/// Return the beginning of a text; `None` for an empty one.
fn text(value: &Value) -> Option<String> {
    let text = value.as_str().filter(|text| !text.is_empty())?;
    Some(text.chars().take(MESSAGE).collect())
}
