//! Pods and nodes with only the fields that Divvy reads. The parser skips all other fields, so the memory for a cluster of 50,000 pods
//! depends only on the fields that are used.

use std::borrow::Cow;
use std::collections::BTreeMap;

use divvy_model::{Vendor, names};
use k8s_openapi::api::core::v1::{Affinity, Taint, Toleration, TopologySpreadConstraint};
use kube::core::{ApiResource, Object};
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A pod with the fields that Divvy reads.
pub type PodObject = Object<PodSpec, PodStatus>;
/// A node with the fields that Divvy reads.
pub type NodeObject = Object<NodeSpec, NodeStatus>;

/// Return the API resource for requests for [`PodObject`]s.
pub fn pods() -> ApiResource {
    ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&())
}

/// Return the API resource for requests for [`NodeObject`]s.
pub fn nodes() -> ApiResource {
    ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&())
}

/// The `spec` of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The node to which the pod is bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// The init containers, in spec order.
    #[serde(deserialize_with = "null_is_default")]
    pub init_containers: Vec<Container>,
    /// The app containers, in spec order.
    #[serde(deserialize_with = "null_is_default")]
    pub containers: Vec<Container>,
    /// Resources for the sandbox itself, which a RuntimeClass adds.
    #[serde(deserialize_with = "null_is_default")]
    pub overhead: ResourceAmounts,
    /// The scheduler that is to bind the pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
    /// The priority, from the PriorityClass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Labels that the pod's node must have.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Rules for the nodes and the other pods with which the pod may run.
    #[serde(skip_serializing)]
    pub affinity: Option<Box<Affinity>>,
    /// Rules for spreading the pod and others like it over nodes or zones.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Taints that the pod tolerates.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub tolerations: Vec<Toleration>,
    /// Scheduling gates. No scheduler considers the pod before they are all removed.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub scheduling_gates: Vec<NameOnly>,
    /// `Never`, or `PreemptLowerPriority`.
    #[serde(skip_serializing)]
    pub preemption_policy: Option<String>,
    /// The volumes, with the fields that decide where the pod can run.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub volumes: Vec<Volume>,
    /// The pod's ResourceClaims.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub resource_claims: Vec<NameOnly>,
}

/// An object of which only the name is read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NameOnly {
    /// The object's name.
    pub name: String,
}

/// A volume of a pod, with only the fields about its claim.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// The volume's name.
    pub name: String,
    /// The PersistentVolumeClaim that the volume refers to.
    pub persistent_volume_claim: Option<VolumeClaim>,
    /// Set if Kubernetes creates a claim for this pod, named `<pod>-<volume>`.
    pub ephemeral: Option<IgnoredAny>,
}

/// The claim of a [`Volume`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeClaim {
    /// The claim's name.
    pub claim_name: String,
}

/// A port of a container, with only the fields about the host's port.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Port {
    /// The port on the host; 0 if there is none.
    pub host_port: u16,
    /// The address of the host; empty means all addresses.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
    /// The protocol; empty means `TCP`.
    pub protocol: String,
}

/// A container of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// The container's name.
    pub name: String,
    /// The container's own restart policy. `Always` makes an init container a sidecar.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
    /// The container's limits and requests.
    #[serde(deserialize_with = "null_is_default")]
    pub resources: ContainerResources,
    /// The value of the environment variable `NVIDIA_VISIBLE_DEVICES`, if the pod's spec states it. Other variables are skipped.
    #[serde(rename = "env", deserialize_with = "visible_devices", skip_serializing)]
    pub visible_devices: Option<String>,
    /// The container's ports.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub ports: Vec<Port>,
}

/// The `resources` of a container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerResources {
    /// Limits by resource name.
    #[serde(deserialize_with = "null_is_default")]
    pub limits: ResourceAmounts,
    /// Requests by resource name.
    #[serde(deserialize_with = "null_is_default")]
    pub requests: ResourceAmounts,
}

/// Amounts by resource name, sorted by name.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ResourceAmounts(Vec<(ResourceName, QuantityText)>);

/// The name of a resource. Common names are borrowed constants and not copied.
type ResourceName = Cow<'static, str>;

impl ResourceAmounts {
    const COMMON: [&str; 6] = [names::GPU_COUNT, names::GPU_MEM, "cpu", "ephemeral-storage", "memory", "pods"];

    /// Return the amount of a resource; `None` if the resource is not listed.
    pub fn get(&self, resource: &str) -> Option<&QuantityText> {
        let found = self.0.binary_search_by(|(name, _)| name.as_ref().cmp(resource));
        found.ok().map(|position| &self.0[position].1)
    }

    /// Report whether a resource is listed, even if its amount is zero.
    pub fn contains_key(&self, resource: &str) -> bool {
        self.get(resource).is_some()
    }

    /// Return the names of the resources.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// Return the resources and their amounts.
    pub fn iter(&self) -> impl Iterator<Item = (&ResourceName, &QuantityText)> {
        self.0.iter().map(|(name, amount)| (name, amount))
    }

    /// Set the amount of a resource.
    pub fn insert(&mut self, resource: &str, amount: QuantityText) {
        self.set(ResourceAmounts::name(resource), amount);
    }

    /// Keep only the resources for whose names `wanted` returns true.
    pub fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|(name, _)| wanted(name));
    }

    /// Remove all amounts.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn name(resource: &str) -> ResourceName {
        let whole = Vendor::ALL.map(Vendor::whole_resource);
        let common = ResourceAmounts::COMMON
            .into_iter()
            .chain(whole)
            .find(|name| *name == resource);
        common.map_or_else(|| Cow::Owned(resource.to_owned()), Cow::Borrowed)
    }

    fn set(&mut self, name: ResourceName, amount: QuantityText) {
        match self.0.binary_search_by(|(known, _)| known.cmp(&name)) {
            Ok(position) => self.0[position].1 = amount,
            Err(position) => self.0.insert(position, (name, amount)),
        }
    }
}

impl Serialize for ResourceAmounts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, amount) in &self.0 {
            map.serialize_entry(name, amount)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for ResourceAmounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<ResourceAmounts, D::Error> {
        struct AmountName(ResourceName);
        impl<'de> Deserialize<'de> for AmountName {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<AmountName, D::Error> {
                struct ResourceNameVisitor;
                impl Visitor<'_> for ResourceNameVisitor {
                    type Value = AmountName;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("the name of a resource")
                    }

                    fn visit_str<E>(self, name: &str) -> Result<AmountName, E> {
                        Ok(AmountName(ResourceAmounts::name(name)))
                    }
                }
                deserializer.deserialize_str(ResourceNameVisitor)
            }
        }
        struct AmountsVisitor;
        impl<'de> Visitor<'de> for AmountsVisitor {
            type Value = ResourceAmounts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of quantities")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<ResourceAmounts, M::Error> {
                let mut amounts = ResourceAmounts::default();
                while let Some(AmountName(name)) = map.next_key()? {
                    amounts.set(name, map.next_value()?);
                }
                Ok(amounts)
            }
        }
        deserializer.deserialize_map(AmountsVisitor)
    }
}

/// The text of a Quantity. In JSON it is a string or, if written by hand, a number.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
#[serde(transparent)]
pub struct QuantityText(pub String);

impl<'de> Deserialize<'de> for QuantityText {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct QuantityVisitor;
        impl serde::de::Visitor<'_> for QuantityVisitor {
            type Value = String;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a quantity: a string or a number")
            }

            fn visit_str<E>(self, text: &str) -> Result<String, E> {
                Ok(text.to_owned())
            }

            fn visit_string<E>(self, text: String) -> Result<String, E> {
                Ok(text)
            }

            fn visit_u64<E>(self, number: u64) -> Result<String, E> {
                Ok(number.to_string())
            }

            fn visit_i64<E>(self, number: i64) -> Result<String, E> {
                Ok(number.to_string())
            }

            fn visit_f64<E>(self, number: f64) -> Result<String, E> {
                Ok(serde_json::Value::from(number).to_string())
            }
        }
        deserializer.deserialize_any(QuantityVisitor).map(QuantityText)
    }
}

/// The `status` of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// The phase, such as `ContainerRunning`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// The conditions, such as `PodScheduled` with the reason why the pod is not scheduled.
    #[serde(deserialize_with = "null_is_default")]
    pub conditions: Vec<Condition>,
    /// The states of the init containers.
    #[serde(deserialize_with = "null_is_default")]
    pub init_container_statuses: Vec<ContainerStatus>,
    /// The states of the app containers.
    #[serde(deserialize_with = "null_is_default")]
    pub container_statuses: Vec<ContainerStatus>,
    /// The node on which kube-scheduler has preempted other pods for this pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nominated_node_name: Option<String>,
    /// Why the pod failed, one word such as `UnexpectedAdmissionError`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Why the pod failed, as a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A condition of a pod or node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// The type, such as `PodScheduled` or `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False`, or `Unknown`.
    pub status: String,
    /// The reason, one word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The message, a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The status of one container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// The container's name.
    pub name: String,
    /// The container runtime and its ID of the container, as in `containerd://ID`.
    #[serde(rename = "containerID", skip_serializing_if = "Option::is_none")]
    pub container_id: Option<Box<str>>,
    /// The container's present state.
    #[serde(deserialize_with = "null_is_default")]
    pub state: ContainerState,
}

/// The state of a container: at most one of the fields is set. `terminated` is not read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// Set if the container is running.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<ContainerRunning>,
    /// Set if the container is waiting.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<ContainerWaiting>,
}

/// The state of a running container. Its start time is not read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct ContainerRunning {}

/// The state of a waiting container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerWaiting {
    /// The reason, one word such as `CreateContainerConfigError`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The message, a sentence.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The `spec` of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSpec {
    /// Whether the node is cordoned.
    pub unschedulable: bool,
    /// The taints. Pods that do not tolerate them are not scheduled to this node.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub taints: Vec<Taint>,
}

/// The `status` of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// The node's total resources.
    #[serde(deserialize_with = "null_is_default")]
    pub capacity: ResourceAmounts,
    /// The resources that pods may request.
    #[serde(deserialize_with = "null_is_default")]
    pub allocatable: ResourceAmounts,
    /// The node's addresses.
    #[serde(deserialize_with = "null_is_default")]
    pub addresses: Vec<StatusAddress>,
    /// Versions of the node's software.
    #[serde(rename = "nodeInfo", skip_serializing_if = "Option::is_none")]
    pub node_info: Option<NodeInfo>,
    /// The node's conditions, without reasons and messages.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub conditions: Vec<NodeCondition>,
}

/// A condition of a node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeCondition {
    /// The type, such as `Ready`.
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False`, or `Unknown`.
    pub status: String,
}

/// The `status.nodeInfo` of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeInfo {
    /// The container runtime and its version, such as `containerd://2.1.4`.
    pub container_runtime_version: String,
}

/// An address of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct StatusAddress {
    /// The type, such as `InternalIP` or `Hostname`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The IP address or host name.
    pub address: String,
}

/// Parse only the variable [`names::VISIBLE_DEVICES`] in a container's `env`. Skip all other variables, because a pod may have
/// hundreds of them.
fn visible_devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct VisibleDevicesVariable {
        #[serde(default)]
        name: IsVisibleDevices,
        #[serde(default)]
        value: Option<String>,
    }

    /// Whether a variable's name is [`names::VISIBLE_DEVICES`].
    #[derive(Default)]
    struct IsVisibleDevices(bool);

    impl<'de> Deserialize<'de> for IsVisibleDevices {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<IsVisibleDevices, D::Error> {
            struct Compare;
            impl Visitor<'_> for Compare {
                type Value = IsVisibleDevices;

                fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                    f.write_str("the name of a variable")
                }

                fn visit_str<E>(self, name: &str) -> Result<IsVisibleDevices, E> {
                    Ok(IsVisibleDevices(name == names::VISIBLE_DEVICES))
                }
            }
            deserializer.deserialize_str(Compare)
        }
    }

    struct Variables;
    impl<'de> Visitor<'de> for Variables {
        type Value = Option<String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a list of variables")
        }

        fn visit_unit<E>(self) -> Result<Option<String>, E> {
            Ok(None)
        }

        fn visit_none<E>(self) -> Result<Option<String>, E> {
            Ok(None)
        }

        fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Option<String>, D::Error> {
            deserializer.deserialize_seq(self)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut variables: A) -> Result<Option<String>, A::Error> {
            let mut last = None;
            while let Some(variable) = variables.next_element::<VisibleDevicesVariable>()? {
                if variable.name.0 {
                    last = variable.value;
                }
            }
            Ok(last)
        }
    }
    deserializer.deserialize_option(Variables)
}

/// Parse a value, or the default for `null`: Go writes nil slices and maps as `null`.
pub fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
