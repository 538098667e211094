//! The namespace of the pods.

use std::time::Duration;

use divvy_kube::in_words;
use divvy_smoke_run::RUN_LABEL;
use k8s_openapi::api::core::v1::{Namespace as Object, Pod};
use kube::api::{Api, DeleteParams, ListParams, PostParams};
use serde_json::json;

/// The value of [`RUN_LABEL`] on a namespace that `divvy smoke` made.
const MADE: &str = "namespace";

/// How often, and with which pause, to look whether the pods have ended, whose grace period is 2 s, or whether the namespace of the run before is gone.
const LOOKS: u32 = 20;
const PAUSE: Duration = Duration::from_millis(500);

/// Report whether a run of `divvy smoke` made a namespace.
fn is_made(object: &Object) -> bool {
    let label = object.metadata.labels.as_ref().and_then(|labels| labels.get(RUN_LABEL));
    label.is_some_and(|value| value == MADE)
}

/// The namespace of the pods.
pub(super) struct Namespace {
    client: kube::Client,
    name: String,
    /// Whether a run of `divvy smoke` made it, so that it is removed when it is empty.
    is_made: bool,
}

impl Namespace {
    /// Make the namespace, unless there is one.
    pub(super) async fn ensure(client: &kube::Client, name: &str) -> anyhow::Result<Namespace> {
        let api: Api<Object> = Api::all(client.clone());
        let namespace = |is_made| Namespace {
            client: client.clone(),
            name: name.to_owned(),
            is_made,
        };
        let mut found = api.get_opt(name).await;
        // The run before this one has just removed it.
        for _ in 0..LOOKS {
            let is_going = |object: &Object| object.metadata.deletion_timestamp.is_some() && is_made(object);
            if !found.as_ref().is_ok_and(|object| object.as_ref().is_some_and(is_going)) {
                break;
            }
            tokio::time::sleep(PAUSE).await;
            found = api.get_opt(name).await;
        }
        match found {
            Ok(Some(object)) => {
                anyhow::ensure!(
                    object.metadata.deletion_timestamp.is_none(),
                    "the namespace {name} is being deleted, and takes no pods; wait until kubectl get namespace {name} finds none, or choose another one with -n"
                );
                return Ok(namespace(is_made(&object)));
            }
            Ok(None) => {}
            // A user with rights in one namespace may not be allowed to get the namespace itself.
            Err(kube::Error::Api(status)) if status.code == 403 => return Ok(namespace(false)),
            Err(error) => anyhow::bail!("the namespace {name} could not be read: {}", in_words(&error)),
        }
        let object: Object = serde_json::from_value(json!({"metadata": {"name": name, "labels": {
            RUN_LABEL: MADE,
            "app.kubernetes.io/managed-by": "divvy-smoke",
            "pod-security.kubernetes.io/enforce": "restricted",
        }}}))?;
        match api.create(&PostParams::default(), &object).await {
            Ok(_) => Ok(namespace(true)),
            // Another run was faster.
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(namespace(true)),
            Err(error) => anyhow::bail!(
                "there is no namespace {name}, and it could not be created: {}; choose a namespace in which you may create pods with -n, or let an administrator \
                 create it: kubectl create namespace {name}",
                in_words(&error)
            ),
        }
    }

    /// Find a namespace that a run is known to use. One that cannot be read is none that a run made.
    pub(super) async fn find(client: &kube::Client, name: &str) -> Namespace {
        let api: Api<Object> = Api::all(client.clone());
        let found = api.get_opt(name).await.ok().flatten();
        Namespace {
            client: client.clone(),
            name: name.to_owned(),
            is_made: found.as_ref().is_some_and(is_made),
        }
    }

    /// Wait until the pods of this run have ended, and remove the namespace, if `divvy smoke` made it and no other pod is in it.
    pub(super) async fn leave(self, run: &str) {
        if !self.is_made {
            return;
        }
        let pods: Api<Pod> = Api::namespaced(self.client.clone(), &self.name);
        let one = ListParams::default().limit(1);
        let of_run = one.clone().labels(&format!("{RUN_LABEL}={run}"));
        let is_empty = async |params: &ListParams| pods.list_metadata(params).await.is_ok_and(|list| list.items.is_empty());
        for _ in 0..LOOKS {
            if is_empty(&of_run).await {
                break;
            }
            tokio::time::sleep(PAUSE).await;
        }
        if !is_empty(&one).await {
            return;
        }
        let namespaces: Api<Object> = Api::all(self.client);
        if let Err(error) = namespaces.delete(&self.name, &DeleteParams::default()).await {
            tracing::warn!(
                "the namespace {} is empty, and could not be deleted: {}",
                self.name,
                in_words(&error)
            );
        }
    }
}
