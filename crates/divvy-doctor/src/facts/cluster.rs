//! Objects of the API server: only the fields that checks look at. All of it is outside input: what is missing or null is empty.

use std::collections::BTreeMap;
use std::fmt;

use divvy_model::names;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::check::Stop;
use crate::checks::is_gpu;

/// What the API server has.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cluster {
    /// `/api/v1/nodes`
    pub nodes: Vec<Node>,
    /// `/api/v1/pods`
    pub pods: Vec<Pod>,
    /// `/apis/apps/v1/daemonsets`
    pub daemon_sets: Vec<DaemonSet>,
    /// `/apis/node.k8s.io/v1/runtimeclasses`
    pub runtime_classes: Vec<RuntimeClass>,
    /// What could not be listed (`nodes`, `pods`, `daemonsets`, `runtimeclasses`), and the reason, with what to type.
    pub refused: BTreeMap<String, String>,
}

impl Cluster {
    /// Goes on if all of these could be listed; else the reason of the first that could not.
    pub(crate) fn listed(&self, plurals: &[&str]) -> Result<(), Stop> {
        match plurals.iter().find_map(|plural| self.refused.get(*plural)) {
            None => Ok(()),
            Some(reason) => Err(Stop::Blind(reason.clone())),
        }
    }
}

/// Labels, annotations or resources, by name. A `BTreeMap` takes half a kilobyte for a single entry, and a cluster has hundreds of thousands of
/// these maps with one or two.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Texts(Vec<(Box<str>, Box<str>)>);

impl Texts {
    /// The text of this name.
    pub fn get(&self, name: &str) -> Option<&str> {
        let position = self.position(name).ok()?;
        Some(&*self.0[position].1)
    }

    /// Whether there is a text of this name.
    pub fn contains_key(&self, name: &str) -> bool {
        self.position(name).is_ok()
    }

    /// Adds a text, in place of the one of this name.
    pub fn insert(&mut self, name: impl Into<Box<str>>, text: impl Into<Box<str>>) {
        let name = name.into();
        match self.position(&name) {
            Ok(position) => self.0[position].1 = text.into(),
            Err(position) => self.0.insert(position, (name, text.into())),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Names and texts, by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, text)| (&**name, &**text))
    }

    /// The names, in order.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// Drops the others, and the room that they took.
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
        struct Read;
        impl<'de> Visitor<'de> for Read {
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
        deserializer.deserialize_map(Read)
    }
}

/// A page of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct Page<T> {
    /// Where the next one begins.
    pub metadata: PageMeta,
    /// The objects.
    #[serde(deserialize_with = "or_default", bound(deserialize = "T: Deserialize<'de>"))]
    pub items: Vec<T>,
}

/// `metadata` of a list.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PageMeta {
    /// Empty on the last page.
    #[serde(rename = "continue")]
    pub next: String,
}

/// Name, namespace and labels.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Meta {
    /// `metadata.name`
    pub name: String,
    /// `metadata.namespace`
    pub namespace: String,
    /// `metadata.labels`
    #[serde(deserialize_with = "or_default")]
    pub labels: Texts,
    /// `metadata.annotations`
    #[serde(deserialize_with = "or_default")]
    pub annotations: Texts,
}

/// A node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Node {
    /// Its name and labels.
    pub metadata: Meta,
    /// Its taints.
    pub spec: NodeSpec,
    /// What it has.
    pub status: NodeStatus,
}

/// `spec` of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct NodeSpec {
    /// What pods must tolerate.
    #[serde(deserialize_with = "or_default")]
    pub taints: Vec<Taint>,
}

/// A taint.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Taint {
    /// `nvidia.com/gpu`
    pub key: String,
    /// Often empty.
    pub value: String,
    /// `NoSchedule`, `NoExecute`, `PreferNoSchedule`
    pub effect: String,
}

/// `status` of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeStatus {
    /// In all.
    #[serde(deserialize_with = "or_default")]
    pub capacity: Texts,
    /// For pods.
    #[serde(deserialize_with = "or_default")]
    pub allocatable: Texts,
    /// What runs on it.
    pub node_info: NodeInfo,
}

/// `status.nodeInfo` of a node.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeInfo {
    /// `v1.33.2+k3s1`
    pub kubelet_version: String,
    /// `containerd://2.1.3`
    pub container_runtime_version: String,
}

/// A pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Pod {
    /// Its name.
    pub metadata: Meta,
    /// What it wants.
    pub spec: PodSpec,
    /// What became of it.
    pub status: PodStatus,
}

impl Pod {
    /// The pod without what no check looks at: a cluster may have tens of thousands of them.
    pub fn slim(mut self) -> Pod {
        let wants_gpu = self.spec.wants_gpu();
        let meta = &mut self.metadata;
        // Divvy's own pods are found by their labels.
        let is_divvys = meta.labels.get(NAME_LABEL) == Some("divvy");
        meta.labels.keep(|name| is_divvys && name.starts_with("app.kubernetes.io/"));
        meta.annotations.keep(|name| name == names::ALLOCATION);
        if meta.annotations.contains_key(names::ALLOCATION) {
            // Checks ask whether there is one, not what it says.
            meta.annotations.insert(names::ALLOCATION, "");
        }
        let spec = &mut self.spec;
        // Where a pod that is bound might have run is nobody's question.
        if spec.node_name.is_some() {
            (spec.tolerations, spec.node_selector) = (Vec::new(), Texts::default());
        }
        for containers in [&mut spec.containers, &mut spec.init_containers] {
            containers.shrink_to_fit();
        }
        for container in spec.containers.iter_mut().chain(&mut spec.init_containers) {
            container.name = String::new();
            // Only of a pod that asks for no GPU does anybody ask whether its image wants one.
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

/// The label that says of which application an object is part.
const NAME_LABEL: &str = "app.kubernetes.io/name";

impl Node {
    /// The node without what no check looks at.
    pub fn slim(mut self) -> Node {
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
pub struct PodSpec {
    /// Where it is bound.
    pub node_name: Option<String>,
    /// The RuntimeClass.
    pub runtime_class_name: Option<String>,
    /// Its containers.
    #[serde(deserialize_with = "or_default")]
    pub containers: Vec<Container>,
    /// Those that run before the others, sidecars among them.
    #[serde(deserialize_with = "or_default")]
    pub init_containers: Vec<Container>,
    /// Taints that it does not mind.
    #[serde(deserialize_with = "or_default")]
    pub tolerations: Vec<Toleration>,
    /// Labels that its node must have.
    #[serde(deserialize_with = "or_default")]
    pub node_selector: Texts,
}

impl PodSpec {
    /// Every container, those that run first among them.
    pub(crate) fn all_containers(&self) -> impl Iterator<Item = &Container> {
        self.init_containers.iter().chain(&self.containers)
    }

    /// Whether any container asks for a GPU, or a share of one.
    pub(crate) fn wants_gpu(&self) -> bool {
        let resources = self.all_containers().map(|container| &container.resources);
        resources
            .flat_map(|resources| resources.limits.keys().chain(resources.requests.keys()))
            .any(is_gpu)
    }
}

/// A container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// Its image.
    pub image: String,
    /// Its variables.
    #[serde(deserialize_with = "or_default")]
    pub env: Vec<Variable>,
    /// What it asks for.
    pub resources: Resources,
    /// What it listens at.
    #[serde(deserialize_with = "or_default")]
    pub ports: Vec<Port>,
}

/// A port of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Port {
    /// Its number.
    pub container_port: u16,
}

/// A variable of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Variable {
    /// Its name.
    pub name: String,
    /// Its value, where the pod writes it out.
    pub value: Option<String>,
    /// Whether the value comes from a ConfigMap, a Secret or a field: the pod does not say what it is.
    #[serde(rename = "valueFrom", deserialize_with = "is_there")]
    pub from_elsewhere: bool,
}

/// `resources` of a container.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// By resource.
    #[serde(deserialize_with = "or_default")]
    pub limits: Texts,
    /// By resource.
    #[serde(deserialize_with = "or_default")]
    pub requests: Texts,
}

/// A toleration.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Toleration {
    /// Empty: every taint.
    pub key: String,
    /// `Exists`, or `Equal` by default.
    pub operator: String,
    /// With `Equal`.
    pub value: String,
    /// Empty: every effect.
    pub effect: String,
}

/// `status` of a pod.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct PodStatus {
    /// `Running`, …
    pub phase: String,
    /// `UnexpectedAdmissionError`
    pub reason: String,
}

/// A DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DaemonSet {
    /// Its name.
    pub metadata: Meta,
    /// Its pods.
    pub spec: DaemonSetSpec,
    /// How many there should be.
    pub status: DaemonSetStatus,
}

/// `spec` of a DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct DaemonSetSpec {
    /// What its pods are.
    pub template: Template,
}

/// The template of pods.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct Template {
    /// As of a pod.
    pub spec: PodSpec,
}

/// `status` of a DaemonSet.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DaemonSetStatus {
    /// Nodes on which it should run.
    pub desired_number_scheduled: u32,
}

/// A RuntimeClass.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub struct RuntimeClass {
    /// Its name.
    pub metadata: Meta,
    /// What engines call it.
    pub handler: String,
}

impl RuntimeClass {
    pub(crate) fn name(&self) -> &str {
        &self.metadata.name
    }
}

/// Go writes nil slices and maps as `null`.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// Whether anything but null is there.
fn is_there<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    Ok(Option::<IgnoredAny>::deserialize(deserializer)?.is_some())
}
