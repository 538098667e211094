//! Objects for lists and watches, parsed directly from JSON with only the fields that Divvy reads.

use std::collections::BTreeMap;
use std::fmt;

use divvy_model::names;
use k8s_openapi::api::core::v1::ConfigMap;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference, Time};
use kube::core::Object;
use serde::de::{DeserializeOwned, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::convert;
use crate::objects::{ContainerStatus, NodeObject, NodeSpec, NodeStatus, PodObject, PodSpec, PodStatus, null_is_default};

/// An object in a list or a watch. [`Object`] itself uses serde's `flatten`, so parsing it builds a tree of the whole text,
/// including `managedFields`. With 50,000 pods, this would take most of the time of a start.
#[derive(Debug, Clone)]
pub struct Slim<P: Clone, U: Clone, L>(pub Object<P, U>, std::marker::PhantomData<L>);

/// A pod without its labels.
pub type SlimPod = Slim<PodSpec, PodStatus, Unread>;
/// A node with its labels, by which pods select nodes.
pub type SlimNode = Slim<NodeSpec, NodeStatus, SlimLabels>;

/// A pod with its labels, its controller, and its conditions, for `divvy why`.
pub type WholePod = Slim<PodSpec, WholeStatus, SlimLabels>;

/// Labels that are kept.
pub type SlimLabels = Option<BTreeMap<String, String>>;

/// A value that is skipped.
#[derive(Debug, Default, Clone, Copy)]
pub struct Unread;

impl<'de> Deserialize<'de> for Unread {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        IgnoredAny::deserialize(deserializer).map(|IgnoredAny| Unread)
    }
}

impl From<Unread> for SlimLabels {
    fn from(_: Unread) -> SlimLabels {
        None
    }
}

#[derive(Deserialize)]
#[serde(bound(deserialize = "P: Deserialize<'de>, U: ReadStatus, L: Default + Deserialize<'de>"))]
struct WireObject<P, U: ReadStatus, L> {
    metadata: Meta<L>,
    spec: P,
    status: Option<U::Read>,
}

/// A status type, and the type that is parsed for it in a list.
pub trait ReadStatus: Clone {
    type Read: DeserializeOwned + Into<Self>;
}

impl ReadStatus for NodeStatus {
    type Read = NodeStatus;
}

impl ReadStatus for PodStatus {
    type Read = ListedStatus;
}

impl ReadStatus for WholeStatus {
    type Read = PodStatus;
}

/// A pod's status with its conditions.
#[derive(Debug, Clone)]
pub struct WholeStatus(PodStatus);

impl From<PodStatus> for WholeStatus {
    fn from(status: PodStatus) -> WholeStatus {
        WholeStatus(status)
    }
}

/// A pod's status without its conditions. The conditions are half of a status and are only needed for single pods.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ListedStatus {
    phase: Option<String>,
    #[serde(deserialize_with = "null_is_default")]
    init_container_statuses: Vec<ContainerStatus>,
    #[serde(deserialize_with = "null_is_default")]
    container_statuses: Vec<ContainerStatus>,
    nominated_node_name: Option<String>,
    reason: Option<String>,
    message: Option<String>,
}

impl From<ListedStatus> for PodStatus {
    fn from(listed: ListedStatus) -> PodStatus {
        PodStatus {
            phase: listed.phase,
            conditions: Vec::new(),
            init_container_statuses: listed.init_container_statuses,
            container_statuses: listed.container_statuses,
            nominated_node_name: listed.nominated_node_name,
            reason: listed.reason,
            message: listed.message,
        }
    }
}

/// The metadata that `convert` reads, and the resourceVersion from which a watch resumes.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Meta<L = Unread> {
    pub name: Option<String>,
    pub namespace: Option<String>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub creation_timestamp: Option<Time>,
    pub deletion_timestamp: Option<Time>,
    #[serde(default, deserialize_with = "read_annotations")]
    pub annotations: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub labels: L,
    #[serde(default)]
    pub owner_references: Option<Vec<OwnerReference>>,
}

impl<L: Into<SlimLabels>> From<Meta<L>> for ObjectMeta {
    fn from(meta: Meta<L>) -> ObjectMeta {
        ObjectMeta {
            name: meta.name,
            namespace: meta.namespace,
            uid: meta.uid,
            resource_version: meta.resource_version,
            creation_timestamp: meta.creation_timestamp,
            deletion_timestamp: meta.deletion_timestamp,
            annotations: meta.annotations,
            labels: meta.labels.into(),
            owner_references: meta.owner_references,
            ..ObjectMeta::default()
        }
    }
}

/// Report whether Divvy reads an annotation.
fn is_read(annotation: &str) -> bool {
    annotation.starts_with(names::PREFIX)
        || annotation.starts_with("ALIYUN_COM_GPU_MEM_")
        || annotation == names::GPUSHARE_ALLOCATION
        || annotation.starts_with(names::OUT_OF_SERVICE)
        || annotation.starts_with(names::UNDER_TEST)
}

/// Parse only the annotations that Divvy reads. The annotation `kubectl.kubernetes.io/last-applied-configuration` may be larger than the rest of
/// the object.
fn read_annotations<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<BTreeMap<String, String>>, D::Error> {
    struct AnnotationKey(Option<String>);
    impl<'de> Deserialize<'de> for AnnotationKey {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<AnnotationKey, D::Error> {
            struct KeyVisitor;
            impl Visitor<'_> for KeyVisitor {
                type Value = AnnotationKey;

                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("the name of an annotation")
                }

                fn visit_str<E>(self, key: &str) -> Result<AnnotationKey, E> {
                    Ok(AnnotationKey(is_read(key).then(|| key.to_owned())))
                }
            }
            deserializer.deserialize_str(KeyVisitor)
        }
    }
    struct Annotations;
    impl<'de> Visitor<'de> for Annotations {
        type Value = Option<BTreeMap<String, String>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map of annotations")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_none<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
            deserializer.deserialize_map(self)
        }

        fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
            let mut read = BTreeMap::new();
            while let Some(AnnotationKey(key)) = map.next_key()? {
                match key {
                    Some(key) => {
                        read.insert(key, map.next_value()?);
                    }
                    None => {
                        map.next_value::<IgnoredAny>()?;
                    }
                }
            }
            Ok(Some(read))
        }
    }
    deserializer.deserialize_option(Annotations)
}

impl<'de, P, U, L> Deserialize<'de> for Slim<P, U, L>
where
    P: Clone + Deserialize<'de>,
    U: ReadStatus,
    L: Default + Into<SlimLabels> + Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let WireObject { metadata, spec, status } = WireObject::<P, U, L>::deserialize(deserializer)?;
        let object = Object {
            types: None,
            metadata: metadata.into(),
            spec,
            status: status.map(Into::into),
        };
        Ok(Slim(object, std::marker::PhantomData))
    }
}

/// A type of object that can be listed and watched.
pub trait Kind: DeserializeOwned + Send + 'static {
    /// The kind's name, for messages.
    const NAME: &'static str;

    fn meta(&self) -> &ObjectMeta;

    /// Return why the object is unusable even though every field has the right type; `None` if it is usable.
    fn trouble(&self) -> Option<String> {
        None
    }

    /// Make an object of which only the metadata could be read.
    fn bare(metadata: ObjectMeta) -> Self;
}

impl Kind for SlimPod {
    const NAME: &'static str = "pod";

    fn meta(&self) -> &ObjectMeta {
        &self.0.metadata
    }

    fn bare(metadata: ObjectMeta) -> SlimPod {
        bare(metadata)
    }
}

impl Kind for WholePod {
    const NAME: &'static str = "pod";

    fn meta(&self) -> &ObjectMeta {
        &self.0.metadata
    }

    fn bare(metadata: ObjectMeta) -> WholePod {
        bare(metadata)
    }
}

impl Kind for SlimNode {
    const NAME: &'static str = "node";

    fn meta(&self) -> &ObjectMeta {
        &self.0.metadata
    }

    fn trouble(&self) -> Option<String> {
        convert::unreadable_quantity(&self.0)
    }

    fn bare(metadata: ObjectMeta) -> SlimNode {
        bare(metadata)
    }
}

impl Kind for ConfigMap {
    const NAME: &'static str = "ConfigMap";

    fn meta(&self) -> &ObjectMeta {
        &self.metadata
    }

    fn bare(metadata: ObjectMeta) -> ConfigMap {
        ConfigMap {
            metadata,
            ..ConfigMap::default()
        }
    }
}

fn bare<P: Clone + Default, U: Clone, L>(metadata: ObjectMeta) -> Slim<P, U, L> {
    let object = Object {
        types: None,
        metadata,
        spec: P::default(),
        status: None,
    };
    Slim(object, std::marker::PhantomData)
}

impl From<SlimPod> for PodObject {
    fn from(Slim(object, _): SlimPod) -> PodObject {
        object
    }
}

impl From<WholePod> for PodObject {
    fn from(Slim(object, _): WholePod) -> PodObject {
        PodObject {
            types: object.types,
            metadata: object.metadata,
            spec: object.spec,
            status: object.status.map(|WholeStatus(status)| status),
        }
    }
}

impl From<SlimNode> for NodeObject {
    fn from(Slim(object, _): SlimNode) -> NodeObject {
        object
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_is_left_out_is_nothing_that_is_read() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": "7", "deletionTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2"}, "labels": {"a": "b"}, "managedFields": [{"fieldsV1": {"f:x": {}}}]},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": 2, "cpu": "1"}}}], "unknown": [1]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "c", "state": {"running": {"startedAt": "x"}}}]}});
        let whole: PodObject = serde_json::from_value(pod.clone()).expect("a pod");
        let slim: SlimPod = serde_json::from_str(&pod.to_string()).expect("a pod");
        assert_eq!(convert::pod(&slim.0), convert::pod(&whole));
        assert_eq!(slim.meta().resource_version.as_deref(), Some("7"));
        let node = json!({"metadata": {"name": "n1", "uid": "u", "annotations": {"divvy.dev/inventory": "{}"}},
            "spec": {"unschedulable": true}, "status": {"capacity": {"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-count": "1"}}});
        let whole: NodeObject = serde_json::from_value(node.clone()).expect("a node");
        let slim: SlimNode = serde_json::from_str(&node.to_string()).expect("a node");
        assert_eq!(convert::node(&slim.0), convert::node(&whole));
        let created: SlimPod = serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {}})).expect("no status yet");
        assert!(created.0.status.is_none());
    }
}
