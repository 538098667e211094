//! The pod that tries a GPU.

use std::time::Duration;

use divvy_model::{TestRun, names};
use serde_json::{Value, json};

use crate::{TestAsk, TestTarget};

/// The path of the program in Divvy's image.
pub const PROGRAM: &str = "/usr/bin/divvy-smoke";
/// The name of the program.
pub const PROGRAM_NAME: &str = "divvy-smoke";
/// The path of the program that copies it into a volume.
const COPIER: &str = "/usr/bin/divvy";
/// Where a container of another image has the program.
pub const VOLUME: &str = "/divvy-smoke";
/// The name of glibc's loader in the volume.
pub const LOADER: &str = "loader";
/// The label of the pods and of the namespace that runs make. On a pod, its value is the run's id.
pub const RUN_LABEL: &str = "divvy.dev/smoke";
/// How long a pod runs after the program should have ended, in seconds. After that the kubelet ends it, even if `divvy smoke` was killed.
const GRACE_S: u64 = 30;

/// What all pods of a run have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TestPodSettings {
    /// The run's id, which is part of the pods' names.
    pub run: TestRun,
    /// The namespace.
    pub namespace: String,
    /// The image.
    pub image: String,
    /// Divvy's image, if `image` is a different one. An init container copies the program and glibc from it.
    pub program_image: Option<String>,
    /// The agent's tolerations.
    pub tolerations: Value,
    /// The PriorityClass with which the pods preempt no others; `None` if the cluster has none.
    pub priority_class: Option<String>,
    /// The limit on the time of one test.
    pub timeout: Duration,
    /// Further arguments of the program, such as `--isolation`.
    pub arguments: Vec<String>,
}

impl TestPodSettings {
    /// Return the name of the pod with this number.
    pub fn name(&self, number: usize) -> String {
        format!("divvy-smoke-{}-{number}", self.run)
    }

    /// Return the number of the pod with this name, if it belongs to this run.
    pub fn number(&self, name: &str) -> Option<usize> {
        name.strip_prefix("divvy-smoke-")?
            .strip_prefix(self.run.as_str())?
            .strip_prefix('-')?
            .parse()
            .ok()
    }

    /// Return the manifest of the pod with this number. Pod Security's level `restricted` admits it.
    pub fn pod(&self, number: usize, target: &TestTarget, ask: TestAsk) -> Value {
        let (resource, amount) = match ask {
            TestAsk::Units(units) => (names::GPU_MEM.into(), units),
            TestAsk::Whole(kind) => (kind.resource(), 1),
        };
        let seconds = self.timeout.as_secs().max(1);
        let timeout = format!("{}ms", self.timeout.as_millis());
        let own = ["here", "--termination-message", "/dev/termination-log", "--timeout", &timeout];
        let arguments: Vec<&str> = own.into_iter().chain(self.arguments.iter().map(String::as_str)).collect();
        let mut annotations = json!({names::GPU_UUID: target.uuid});
        if target.failed_before.is_some() {
            // Without it, no pod gets a GPU that is out of service.
            annotations[names::GPU_TEST] = self.run.as_str().into();
        }
        let field = |name: &str, path: &str| json!({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}});
        let mut pod = json!({
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {
                "name": self.name(number),
                "namespace": self.namespace,
                "labels": {RUN_LABEL: self.run.as_str(), "app.kubernetes.io/name": "divvy-smoke", "app.kubernetes.io/managed-by": "divvy-smoke"},
                "annotations": annotations,
            },
            "spec": {
                "restartPolicy": "Never",
                // The kubelet ends the pod, even if `divvy smoke` was killed.
                "activeDeadlineSeconds": seconds + GRACE_S,
                "terminationGracePeriodSeconds": 2,
                "automountServiceAccountToken": false,
                "enableServiceLinks": false,
                // With nodeName instead, neither the scheduler nor the extender would see the pod.
                "nodeSelector": {"kubernetes.io/hostname": target.hostname},
                "tolerations": self.tolerations,
                "securityContext": {
                    "runAsNonRoot": true,
                    "runAsUser": 65532,
                    "runAsGroup": 65532,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [{
                    "name": "smoke",
                    "image": self.image,
                    "imagePullPolicy": "IfNotPresent",
                    "command": [PROGRAM],
                    "args": arguments,
                    "env": [field("NODE_NAME", "spec.nodeName"), field("POD_NAME", "metadata.name")],
                    "resources": {"limits": {resource: amount.to_string()}},
                    "terminationMessagePath": "/dev/termination-log",
                    "securityContext": {
                        "allowPrivilegeEscalation": false,
                        "readOnlyRootFilesystem": true,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }],
            },
        });
        if let Some(image) = &self.program_image {
            carry(&mut pod["spec"], image);
        }
        if let Some(class) = &self.priority_class {
            pod["spec"]["priorityClassName"] = class.as_str().into();
        }
        pod
    }
}

/// Have a container of Divvy's image copy the program into a volume, and start it from there. A volume of the node would need a `hostPath`, which Pod
/// Security's level `restricted` refuses.
fn carry(spec: &mut Value, image: &str) {
    spec["volumes"] = json!([{"name": "program", "emptyDir": {"sizeLimit": "32Mi"}}]);
    let container = &mut spec["containers"][0];
    let program = format!("{VOLUME}/{PROGRAM_NAME}");
    container["command"] = json!([format!("{VOLUME}/{LOADER}"), "--library-path", VOLUME, program]);
    container["volumeMounts"] = json!([{"name": "program", "mountPath": VOLUME, "readOnly": true}]);
    spec["initContainers"] = json!([{
        "name": "program",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": [COPIER, "copy-smoke-to", VOLUME],
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container["securityContext"],
        "volumeMounts": [{"name": "program", "mountPath": VOLUME}],
    }]);
}
