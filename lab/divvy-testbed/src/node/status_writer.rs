//! The kubelet's status manager for one pod. It writes the worker's status in a separate task, retries until the write succeeds, and deletes
//! the object for good once its containers have ended.

use std::time::Duration;

use k8s_openapi::api::core::v1::{Pod, PodStatus};
use kube::api::{DeleteParams, Patch, PatchParams, Preconditions};
use kube::{Api, Client};
use tokio::sync::watch;

/// The state that the API server must receive.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct Desired {
    pub(crate) status: Option<PodStatus>,
    /// Whether to delete the object: its deletion was requested, and none of its containers is running.
    pub(crate) finalize: bool,
}

enum StatusWrite {
    Yes,
    /// The object is gone, or another object has its name.
    Gone,
    Retry,
}

fn outcome<T>(result: kube::Result<T>, what: &str) -> StatusWrite {
    match result {
        Ok(_) => StatusWrite::Yes,
        Err(kube::Error::Api(status)) if status.code == 404 => StatusWrite::Gone,
        // The precondition on the UID failed: the name belongs to another pod now.
        Err(kube::Error::Api(status)) if status.code == 409 && status.message.to_lowercase().contains("uid") => StatusWrite::Gone,
        Err(error) => {
            tracing::warn!(%error, what, "write failed; it will be retried");
            StatusWrite::Retry
        }
    }
}

/// Turn a status into a patch that replaces the stored status. A real kubelet's patch is the difference to the stored status, so fields that
/// the new status lacks are removed: a pod that is rejected after a restart no longer lists its earlier containers.
fn whole(status: &PodStatus) -> serde_json::Value {
    let mut value = serde_json::json!(status);
    for field in [
        "containerStatuses",
        "initContainerStatuses",
        "message",
        "reason",
        "podIP",
        "podIPs",
    ] {
        if value[field].is_null() {
            value[field] = serde_json::Value::Null;
        }
    }
    value
}

/// Write statuses until the worker or the object is gone.
pub(crate) async fn write_status(
    client: Client,
    namespace: String,
    name: String,
    uid: String,
    mut desired: watch::Receiver<Desired>,
    retry: Duration,
) {
    let api: Api<Pod> = Api::namespaced(client, &namespace);
    let mut written: Option<PodStatus> = None;
    let mut deleted = false;
    loop {
        let now = desired.borrow_and_update().clone();
        let mut result = StatusWrite::Yes;
        if let Some(status) = now.status.as_ref().filter(|status| written.as_ref() != Some(status)) {
            let patch = serde_json::json!({"metadata": {"uid": uid}, "status": whole(status)});
            result = outcome(
                api.patch_status(&name, &PatchParams::default(), &Patch::Merge(patch)).await,
                "pod status",
            );
            if matches!(result, StatusWrite::Yes) {
                written = Some(status.clone());
            }
        }
        if matches!(result, StatusWrite::Yes) && now.finalize && !deleted {
            let params = DeleteParams {
                grace_period_seconds: Some(0),
                preconditions: Some(Preconditions {
                    uid: Some(uid.clone()),
                    resource_version: None,
                }),
                ..DeleteParams::default()
            };
            result = outcome(api.delete(&name, &params).await, "pod deletion");
            deleted = matches!(result, StatusWrite::Yes);
        }
        match result {
            StatusWrite::Gone => return,
            StatusWrite::Retry => tokio::time::sleep(retry).await,
            StatusWrite::Yes => {
                if desired.changed().await.is_err() {
                    return;
                }
            }
        }
    }
}
