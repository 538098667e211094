//! The loop's writes: bindings, conditions, nominations, evictions, and events. Each request runs in a separate task.

use std::sync::Arc;

use k8s_openapi::api::core::v1::{Binding, ObjectReference, Pod, PodCondition};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions};
use kube::{Api, Client};

use super::{BindOutcome, Loop, PodBindError, uid_of};
use crate::node::events::RecordedEvent;

impl Loop {
    /// Bind the pod, through the extender if the extender handles it.
    pub(super) fn bind(&self, pod: Arc<Pod>, node: String) {
        let (client, binds, token) = (self.client.clone(), self.binds.clone(), self.token.clone());
        let extender = self.extender.clone().filter(|extender| extender.is_interested(&pod));
        self.tasks.spawn(async move {
            let work = async {
                let meta = &pod.metadata;
                let (name, namespace) = (
                    meta.name.clone().unwrap_or_default(),
                    meta.namespace.clone().unwrap_or_default(),
                );
                let uid = uid_of(&pod);
                let result = match extender {
                    Some(extender) => extender
                        .bind(&namespace, &name, &uid, &node)
                        .await
                        .map_err(PodBindError::from),
                    None => bind_directly(client, &namespace, &name, &uid, &node).await,
                };
                // The receiver is gone only when the whole scheduler ends.
                let _ = binds.send(BindOutcome { pod, node, result });
            };
            let _ = token.run_until_cancelled(work).await;
        });
    }

    /// Delete a victim.
    pub(super) fn evict(&self, victim: &Pod, preemptor: &Pod, node: &str) {
        self.note(
            victim,
            false,
            "Preempted",
            format!("Preempted by pod {} on node {node}", uid_of(preemptor)),
        );
        if victim.metadata.deletion_timestamp.is_some() {
            return;
        }
        let api: Api<Pod> = Api::namespaced(self.client.clone(), victim.metadata.namespace.as_deref().unwrap_or("default"));
        let name = victim.metadata.name.clone().unwrap_or_default();
        let params = DeleteParams::default().preconditions(Preconditions {
            uid: victim.metadata.uid.clone(),
            resource_version: None,
        });
        let token = self.token.clone();
        self.tasks.spawn(async move {
            if let Some(Err(error)) = token.run_until_cancelled(api.delete(&name, &params)).await {
                tracing::warn!(%error, name, "could not delete a victim");
            }
        });
    }

    /// Nominate the node for the pod.
    pub(super) fn nominate(&self, pod: &Pod, node: &str) {
        self.write_status(pod, &serde_json::json!({"nominatedNodeName": node}));
    }

    /// Write the reason why the pod has no node into the condition PodScheduled, unless it is already there.
    pub(super) fn write_condition(&self, pod: &Pod, reason: &str, message: String) {
        let known = pod
            .status
            .as_ref()
            .and_then(|status| status.conditions.clone())
            .unwrap_or_default();
        let stands = |condition: &PodCondition| {
            condition.type_ == "PodScheduled"
                && condition.status == "False"
                && condition.reason.as_deref() == Some(reason)
                && condition.message.as_deref() == Some(message.as_str())
        };
        if known.iter().any(stands) {
            return;
        }
        let mut conditions: Vec<PodCondition> = known
            .into_iter()
            .filter(|condition| condition.type_ != "PodScheduled")
            .collect();
        conditions.push(PodCondition {
            type_: "PodScheduled".to_owned(),
            status: "False".to_owned(),
            reason: Some(reason.to_owned()),
            message: Some(message),
            last_transition_time: Some(Time(jiff::Timestamp::now())),
            ..PodCondition::default()
        });
        self.write_status(pod, &serde_json::json!({"conditions": conditions}));
    }

    fn write_status(&self, pod: &Pod, status: &serde_json::Value) {
        let api: Api<Pod> = Api::namespaced(self.client.clone(), pod.metadata.namespace.as_deref().unwrap_or("default"));
        let name = pod.metadata.name.clone().unwrap_or_default();
        let patch = serde_json::json!({"metadata": {"uid": uid_of(pod)}, "status": status});
        let token = self.token.clone();
        self.tasks.spawn(async move {
            let params = PatchParams::default();
            let patch = Patch::Merge(patch);
            if let Some(Err(error)) = token.run_until_cancelled(api.patch_status(&name, &params, &patch)).await {
                tracing::warn!(%error, name, "could not write the pod's status");
            }
        });
    }

    /// Write an event about the pod.
    pub(super) fn note(&self, pod: &Pod, warning: bool, reason: &str, message: String) {
        self.recorder.note(RecordedEvent {
            namespace: pod.metadata.namespace.clone().unwrap_or_default(),
            pod: pod.metadata.name.clone().unwrap_or_default(),
            uid: uid_of(pod),
            warning,
            reason: reason.to_owned(),
            message,
        });
    }
}

async fn bind_directly(client: Client, namespace: &str, name: &str, uid: &str, node: &str) -> Result<(), PodBindError> {
    let api: Api<Pod> = Api::namespaced(client, namespace);
    let binding = Binding {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            namespace: Some(namespace.to_owned()),
            uid: Some(uid.to_owned()),
            ..ObjectMeta::default()
        },
        target: ObjectReference {
            kind: Some("Node".to_owned()),
            name: Some(node.to_owned()),
            ..ObjectReference::default()
        },
    };

    let sent: kube::Result<serde_json::Value> = api
        .create_subresource("binding", name, &PostParams::default(), &binding)
        .await;
    sent.map(drop).map_err(PodBindError::Api)
}
