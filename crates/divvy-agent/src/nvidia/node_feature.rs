//! Writes the NodeFeature object, from which Node Feature Discovery takes the labels.

use std::path::PathBuf;

use divvy_kube::client::{ClusterChoice, connect};
use divvy_labels::{Labels, NodeFeature, node_feature};
use kube::api::{Api, ApiResource, DynamicObject, GroupVersionKind, ObjectMeta, PostParams};
use kube::core::PartialObjectMeta;
use serde_json::{Value, json};
use tracing::{info, warn};

use crate::Error;

/// Where the NodeFeature object is written.
#[derive(Debug, Clone, Default)]
pub(super) struct ClusterOptions {
    pub(super) kubeconfig: Option<PathBuf>,
    pub(super) node: String,
    pub(super) namespace: String,
    pub(super) pod: Option<String>,
}

/// The NodeFeature object of this node.
pub(crate) struct PublishedFeature {
    objects: Api<DynamicObject>,
    of: NodeFeature,
    /// The labels that this process wrote last.
    written: Option<Labels>,
}

impl PublishedFeature {
    pub(super) async fn connect(options: &ClusterOptions) -> Result<PublishedFeature, Error> {
        let client = connect(&ClusterChoice {
            kubeconfig: options.kubeconfig.clone(),
            ..ClusterChoice::default()
        })
        .await?
        .client;
        let of = NodeFeature {
            node: options.node.clone(),
            namespace: options.namespace.clone(),
            owners: Vec::new(),
        };
        Ok(PublishedFeature::new(client, of, options.pod.as_deref()).await)
    }

    /// Return the object of a node. Its owners are `pod` and what owns that pod.
    pub(crate) async fn new(client: kube::Client, of: NodeFeature, pod: Option<&str>) -> PublishedFeature {
        let kind = GroupVersionKind::gvk("nfd.k8s-sigs.io", "v1alpha1", "NodeFeature");
        let resource = ApiResource::from_gvk_with_plural(&kind, "nodefeatures");
        let owners = match pod {
            Some(pod) => owners(&client, &of.namespace, pod).await,
            None => Vec::new(),
        };
        PublishedFeature {
            objects: Api::namespaced_with(client, &of.namespace, &resource),
            of: NodeFeature { owners, ..of },
            written: None,
        }
    }

    /// Create or update the object, if the labels have changed.
    pub(crate) async fn write(&mut self, labels: &Labels) -> Result<(), Error> {
        if self.written.as_ref() == Some(labels) {
            return Ok(());
        }
        let broken = |error: &dyn std::fmt::Display| {
            Error::Labels(format!("the labels cannot be written to the NodeFeature object: {error}"))
        };
        let mut wanted: DynamicObject = serde_json::from_value(node_feature(labels, &self.of)).map_err(|error| broken(&error))?;
        let name = wanted.metadata.name.clone().unwrap_or_default();
        // NVIDIA's chart allows create and update, but not patch.
        match self.objects.get_opt(&name).await.map_err(|error| broken(&error))? {
            Some(now) if now.data.get("spec") == wanted.data.get("spec") => {}
            Some(now) => {
                wanted.metadata.resource_version = now.metadata.resource_version;
                let replaced = self.objects.replace(&name, &PostParams::default(), &wanted).await;
                replaced.map_err(|error| broken(&error))?;
                info!("updated NodeFeature {name}");
            }
            None => {
                let created = self.objects.create(&PostParams::default(), &wanted).await;
                created.map_err(|error| broken(&error))?;
                info!("created NodeFeature {name}");
            }
        }
        self.written = Some(labels.clone());
        Ok(())
    }
}

/// Return the owners of the object: the pod and the pod's own owner. When the DaemonSet is deleted, the labels are deleted as
/// well.
async fn owners(client: &kube::Client, namespace: &str, pod: &str) -> Vec<Value> {
    let pods: Api<k8s_openapi::api::core::v1::Pod> = Api::namespaced(client.clone(), namespace);
    let PartialObjectMeta { metadata, .. } = match pods.get_metadata(pod).await {
        Ok(found) => found,
        Err(error) => {
            warn!("cannot read this pod, {namespace}/{pod}: {error}; the NodeFeature object will have no owner");
            return Vec::new();
        }
    };
    let ObjectMeta {
        owner_references, uid, ..
    } = metadata;
    let controllers = owner_references.into_iter().flatten().map(|owner| json!(owner));
    let own = json!({"apiVersion": "v1", "kind": "Pod", "name": pod, "uid": uid.unwrap_or_default()});
    controllers.chain([own]).collect()
}
