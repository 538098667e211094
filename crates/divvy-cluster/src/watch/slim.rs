use std::borrow::Cow;
use std::collections::BTreeMap;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time};
use kube::Resource;
use kube::core::{ApiResource, DynamicResourceScope, Object};
use serde::{Deserialize, Deserializer};

/// An object of which only what is read is ever taken out of the JSON. [`Object`] itself is parsed by way of a tree of the whole
/// text (its `flatten`), `managedFields` and all: in a list of 50,000 pods that is most of the time that a start takes.
#[derive(Debug, Clone)]
pub(super) struct Slim<P: Clone, U: Clone>(pub(super) Object<P, U>);

#[derive(Deserialize)]
struct Wire<P, U> {
    metadata: Meta,
    spec: P,
    status: Option<U>,
}

/// What `convert` reads, and what a watch goes on from.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Meta {
    pub(crate) name: Option<String>,
    pub(crate) namespace: Option<String>,
    pub(crate) uid: Option<String>,
    pub(crate) resource_version: Option<String>,
    pub(crate) deletion_timestamp: Option<Time>,
    pub(crate) annotations: Option<BTreeMap<String, String>>,
}

impl From<Meta> for ObjectMeta {
    fn from(meta: Meta) -> ObjectMeta {
        ObjectMeta {
            name: meta.name,
            namespace: meta.namespace,
            uid: meta.uid,
            resource_version: meta.resource_version,
            deletion_timestamp: meta.deletion_timestamp,
            annotations: meta.annotations,
            ..ObjectMeta::default()
        }
    }
}

impl<'de, P, U> Deserialize<'de> for Slim<P, U>
where
    P: Clone + Deserialize<'de>,
    U: Clone + Deserialize<'de>,
{
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Wire { metadata, spec, status } = Wire::deserialize(deserializer)?;
        Ok(Slim(Object {
            types: None,
            metadata: metadata.into(),
            spec,
            status,
        }))
    }
}

impl<P: Clone, U: Clone> Resource for Slim<P, U> {
    type DynamicType = ApiResource;
    type Scope = DynamicResourceScope;

    fn group(dt: &ApiResource) -> Cow<'_, str> {
        Object::<P, U>::group(dt)
    }

    fn version(dt: &ApiResource) -> Cow<'_, str> {
        Object::<P, U>::version(dt)
    }

    fn kind(dt: &ApiResource) -> Cow<'_, str> {
        Object::<P, U>::kind(dt)
    }

    fn plural(dt: &ApiResource) -> Cow<'_, str> {
        Object::<P, U>::plural(dt)
    }

    fn meta(&self) -> &ObjectMeta {
        self.0.meta()
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        self.0.meta_mut()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::convert;
    use crate::objects::{NodeObject, NodeSpec, NodeStatus, PodObject, PodSpec, PodStatus};

    #[test]
    fn what_is_left_out_is_nothing_that_is_read() {
        let pod = json!({"apiVersion": "v1", "kind": "Pod",
            "metadata": {"name": "p", "namespace": "ns", "uid": "u", "resourceVersion": "7", "deletionTimestamp": "2026-01-01T00:00:00Z",
                "annotations": {"ALIYUN_COM_GPU_MEM_IDX": "1", "ALIYUN_COM_GPU_MEM_POD": "2"}, "labels": {"a": "b"}, "managedFields": [{"fieldsV1": {"f:x": {}}}]},
            "spec": {"nodeName": "n1", "containers": [{"name": "c", "resources": {"limits": {"aliyun.com/gpu-mem": 2, "cpu": "1"}}}], "unknown": [1]},
            "status": {"phase": "Running", "containerStatuses": [{"name": "c", "state": {"running": {"startedAt": "x"}}}]}});
        let whole: PodObject = serde_json::from_value(pod.clone()).expect("a pod");
        let slim: Slim<PodSpec, PodStatus> = serde_json::from_str(&pod.to_string()).expect("a pod");
        assert_eq!(convert::pod(&slim.0), convert::pod(&whole));
        assert_eq!(slim.meta().resource_version.as_deref(), Some("7"));
        let node = json!({"metadata": {"name": "n1", "uid": "u", "annotations": {"divvy.dev/inventory": "{}"}},
            "spec": {"unschedulable": true}, "status": {"capacity": {"aliyun.com/gpu-mem": "8", "aliyun.com/gpu-count": "1"}}});
        let whole: NodeObject = serde_json::from_value(node.clone()).expect("a node");
        let slim: Slim<NodeSpec, NodeStatus> = serde_json::from_str(&node.to_string()).expect("a node");
        assert_eq!(convert::node(&slim.0), convert::node(&whole));
        let created: Slim<PodSpec, PodStatus> =
            serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": {}})).expect("no status yet");
        assert!(created.0.status.is_none());
    }
}
