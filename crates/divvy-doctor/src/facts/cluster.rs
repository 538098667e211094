//! Objects of the API server, with only the fields that checks use. They are untrusted input. A missing or null field is read as
//! an empty value.

use std::collections::BTreeMap;
use std::fmt;

use divvy_model::names;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::check::CheckStop;
use crate::gpu_resource::is_gpu;

/// The objects that the API server returned.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ClusterFacts {
    /// The nodes (`/api/v1/nodes`).
    pub nodes: Vec<CheckedNode>,
    /// The pods of all namespaces (`/api/v1/pods`).
    pub pods: Vec<CheckedPod>,
    /// The DaemonSets of all namespaces (`/apis/apps/v1/daemonsets`).
    pub daemon_sets: Vec<DaemonSet>,
    /// The RuntimeClasses (`/apis/node.k8s.io/v1/runtimeclasses`).
    pub runtime_classes: Vec<RuntimeClass>,
    /// The lists that could not be read (`nodes`, `pods`, `daemonsets`, `runtimeclasses`), each with the reason and what to type.
    pub refused: BTreeMap<String, String>,
}

impl ClusterFacts {
    /// Return [`CheckStop::Blind`] with the reason if one of these lists could not be read.
    pub(crate) fn listed(&self, plurals: &[&str]) -> Result<(), CheckStop> {
        match plurals.iter().find_map(|plural| self.refused.get(*plural)) {
            None => Ok(()),
            Some(reason) => Err(CheckStop::Blind(reason.clone())),
        }
    }
}

/// Labels, annotations, or resources: texts by name, sorted by name. A sorted vector saves memory. A `BTreeMap` takes half a
/// kilobyte even for a single entry, and a large cluster has hundreds of thousands of these maps, most with one or two entries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts(Vec<(Box<str>, Box<str>)>);

impl Texts {
    /// Return the text with this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        let position = self.position(name).ok()?;
        Some(&*self.0[position].1)
    }

    /// Report whether there is a text with this name.
    pub fn contains_key(&self, name: &str) -> bool {
        self.position(name).is_ok()
    }

    /// Add a text, or replace the text with this name.
    pub fn insert(&mut self, name: impl Into<Box<str>>, text: impl Into<Box<str>>) {
        let name = name.into();
        match self.position(&name) {
            Ok(position) => self.0[position].1 = text.into(),
            Err(position) => self.0.insert(position, (name, text.into())),
        }
    }

    /// Report whether there are no texts.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Return all names and texts, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, text)| (&**name, &**text))
    }

    /// Return the names, sorted.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// Keep only the texts with wanted names, and release the unused memory.
    fn keep(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|(name, _)| wanted(name));
        self.0.shrink_to_fit();
    }

    fn position(&self, name: &str) -> Result<usize, usize> {
        self.0.binary_search_by(|(known, _)| (**known).cmp(name))
    }
}

impl<N: Into<Box<str>>, T: Into<Box<str>>> FromIterator<(N, T)> for Texts {
    fn from_iter<I: IntoIterator<Item = (N, T)>>(all: I) -> Texts {
        let mut texts = Texts::default();
        for (name, text) in all {
            texts.insert(name, text);
        }
        texts
    }
}

impl<'de> Deserialize<'de> for Texts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Texts, D::Error> {
        struct TextsVisitor;
        impl<'de> Visitor<'de> for TextsVisitor {
            type Value = Texts;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of texts")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Texts, M::Error> {
                let mut texts = Texts::default();
                while let Some((name, text)) = map.next_entry::<Box<str>, Box<str>>()? {
                    texts.insert(name, text);
                }
                Ok(texts)
            }
        }
        deserializer.deserialize_map(TextsVisitor)
    }
}

/// One page of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct ListPage<T> {
    /// The metadata, with the token of the next page.
    pub metadata: PageMeta,
    /// The objects of this page.
    #[serde(deserialize_with = "or_default", bound(deserialize = "T: Deserialize<'de>"))]
    pub items: Vec<T>,
}

/// `metadata` of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PageMeta {
    /// The `continue` token for the next page. It is empty on the last page.
    #[serde(rename = "continue")]
    pub next: String,
}

/// `metadata` of an object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedMeta {
    /// `metadata.name`.
    pub name: String,
    /// `metadata.namespace`, empty for objects without a namespace.
    pub namespace: String,
    /// `metadata.labels`.
    #[serde(deserialize_with = "or_default")]
    pub labels: Texts,
    /// `metadata.annotations`.
    #[serde(deserialize_with = "or_default")]
    pub annotations: Texts,
}

/// A Node object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedNode {
    /// The node's name, labels, and annotations.
    pub metadata: CheckedMeta,
    /// The node's taints.
    pub spec: CheckedNodeSpec,
    /// The node's resources and versions.
    pub status: CheckedNodeStatus,
}

/// `spec` of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedNodeSpec {
    /// The taints that pods must tolerate.
    #[serde(deserialize_with = "or_default")]
    pub taints: Vec<Taint>,
}

/// A taint of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Taint {
    /// The key, such as `nvidia.com/gpu`.
    pub key: String,
    /// The value, often empty.
    pub value: String,
    /// `NoSchedule`, `NoExecute`, or `PreferNoSchedule`.
    pub effect: String,
}

/// `status` of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckedNodeStatus {
    /// All resources of the node, by name.
    #[serde(deserialize_with = "or_default")]
    pub capacity: Texts,
    /// The resources that pods may use, by name. Unhealthy devices are not included.
    #[serde(deserialize_with = "or_default")]
    pub allocatable: Texts,
    /// The versions of the node's software.
    pub node_info: CheckedNodeInfo,
}

/// `status.nodeInfo` of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckedNodeInfo {
    /// The kubelet version, such as `v1.33.2+k3s1`.
    pub kubelet_version: String,
    /// The container runtime and its version, such as `containerd://2.1.3`.
    pub container_runtime_version: String,
}

/// A Pod object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedPod {
    /// The pod's name, namespace, labels, and annotations.
    pub metadata: CheckedMeta,
    /// The pod's containers and scheduling rules.
    pub spec: CheckedPodSpec,
    /// The pod's phase.
    pub status: CheckedPodStatus,
}

impl CheckedPod {
    /// Return the pod without the fields that no check uses, to save memory: a cluster may have tens of thousands of pods.
    pub fn slim(mut self) -> CheckedPod {
        let wants_gpu = self.spec.wants_gpu();
        let meta = &mut self.metadata;
        // Checks find Divvy's own pods by their labels.
        let is_divvys = meta.labels.get(NAME_LABEL) == Some("divvy");
        meta.labels.keep(|name| is_divvys && name.starts_with("app.kubernetes.io/"));
        meta.annotations.keep(|name| name == names::ALLOCATION);
        if meta.annotations.contains_key(names::ALLOCATION) {
            // Checks use only the presence of the annotation, not its value.
            meta.annotations.insert(names::ALLOCATION, "");
        }
        let spec = &mut self.spec;
        // No check evaluates the scheduling rules of a bound pod.
        if spec.node_name.is_some() {
            (spec.tolerations, spec.node_selector) = (Vec::new(), Texts::default());
        }
        for containers in [&mut spec.containers, &mut spec.init_containers] {
            containers.shrink_to_fit();
        }
        for container in spec.containers.iter_mut().chain(&mut spec.init_containers) {
            container.name = String::new();
            // Only K15 uses the image, and only if the pod does not request a GPU.
            if wants_gpu {
                container.image = String::new();
            }
            container.env.retain(|variable| variable.name == names::VISIBLE_DEVICES);
            container.env.shrink_to_fit();
            container.ports.shrink_to_fit();
            container.resources.limits.keep(is_gpu);
            container.resources.requests.keep(is_gpu);
        }
        self
    }
}

/// The label with the name of the application to which an object belongs.
const NAME_LABEL: &str = "app.kubernetes.io/name";

impl CheckedNode {
    /// Return the node without the fields that no check uses.
    pub fn slim(mut self) -> CheckedNode {
        self.metadata.annotations.keep(|name| name == names::INVENTORY);
        for resources in [&mut self.status.capacity, &mut self.status.allocatable] {
            resources.keep(is_gpu);
        }
        self.spec.taints.shrink_to_fit();
        self
    }
}

/// `spec` of a pod, and of a DaemonSet's template.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckedPodSpec {
    /// The node to which the pod is bound.
    pub node_name: Option<String>,
    /// The name of the RuntimeClass.
    pub runtime_class_name: Option<String>,
    /// The containers.
    #[serde(deserialize_with = "or_default")]
    pub containers: Vec<ContainerFacts>,
    /// The init containers, including sidecars.
    #[serde(deserialize_with = "or_default")]
    pub init_containers: Vec<ContainerFacts>,
    /// The tolerations.
    #[serde(deserialize_with = "or_default")]
    pub tolerations: Vec<Toleration>,
    /// The labels that the pod's node must have.
    #[serde(deserialize_with = "or_default")]
    pub node_selector: Texts,
}

impl CheckedPodSpec {
    /// Return all containers. Init containers come first.
    pub(crate) fn all_containers(&self) -> impl Iterator<Item = &ContainerFacts> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Report whether any container requests a GPU or a share of one.
    pub(crate) fn wants_gpu(&self) -> bool {
        let resources = self.all_containers().map(|container| &container.resources);
        resources
            .flat_map(|resources| resources.limits.keys().chain(resources.requests.keys()))
            .any(is_gpu)
    }
}

/// A container or init container of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct ContainerFacts {
    /// The name of the container.
    pub name: String,
    /// The image.
    pub image: String,
    /// The environment variables.
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<CheckedVariable>,
    /// The requests and limits.
    pub resources: CheckedResources,
    /// The ports on which the container listens.
    #[serde(deserialize_with = "or_default")]
    pub ports: Vec<CheckedPort>,
}

/// A port of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckedPort {
    /// The port number.
    pub container_port: u16,
}

/// An environment variable of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckedVariable {
    /// The name of the variable.
    pub name: String,
    /// The value, if the pod contains it literally.
    pub value: Option<String>,
    /// Whether the value comes from a ConfigMap, a Secret, or a field. In this case, the pod's object does not contain the value.
    #[serde(rename = "valueFrom", deserialize_with = "is_there")]
    pub from_elsewhere: bool,
}

/// `resources` of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedResources {
    /// The limits, by resource name.
    #[serde(deserialize_with = "or_default")]
    pub limits: Texts,
    /// The requests, by resource name.
    #[serde(deserialize_with = "or_default")]
    pub requests: Texts,
}

/// A toleration of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// The taint's key. If it is empty and the operator is `Exists`, the toleration matches every taint.
    pub key: String,
    /// `Exists` or `Equal`. Empty means `Equal`.
    pub operator: String,
    /// The taint's value, for the operator `Equal`.
    pub value: String,
    /// The taint's effect. Empty means every effect.
    pub effect: String,
}

/// `status` of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedPodStatus {
    /// The phase, such as `Running`.
    pub phase: String,
    /// The reason of a failure, such as `UnexpectedAdmissionError`.
    pub reason: String,
}

/// A DaemonSet object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DaemonSet {
    /// The DaemonSet's name, namespace, and labels.
    pub metadata: CheckedMeta,
    /// The template of the DaemonSet's pods.
    pub spec: DaemonSetSpec,
    /// The status, which contains the number of pods that the DaemonSet should have.
    pub status: DaemonSetStatus,
}

/// `spec` of a DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DaemonSetSpec {
    /// The template of the pods.
    pub template: CheckedTemplate,
}

/// The pod template of a DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct CheckedTemplate {
    /// The PodSpec of the DaemonSet's pods.
    pub spec: CheckedPodSpec,
}

/// `status` of a DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DaemonSetStatus {
    /// The number of nodes that should run a pod of the DaemonSet.
    pub desired_number_scheduled: u32,
}

/// A RuntimeClass object.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RuntimeClass {
    /// The RuntimeClass's name.
    pub metadata: CheckedMeta,
    /// The name of the runtime handler in the engine's configuration.
    pub handler: String,
}

impl RuntimeClass {
    pub(crate) fn name(&self) -> &str {
        &self.metadata.name
    }
}

/// Deserialize `null` as the default value, because Go writes nil slices and maps as `null`.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Report whether the value is not `null`.
fn is_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<IgnoredAny>::deserialize(deserializer)?.is_some())
}
