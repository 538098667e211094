//! Pods and nodes with only the fields that Divvy reads. Everything else is skipped while it is parsed, so that a
//! cluster of 50,000 pods costs what we use of it.

use std::borrow::Cow;
use std::collections::BTreeMap;

use divvy_model::names;
use k8s_openapi::api::core::v1::{Affinity, Taint, Toleration, TopologySpreadConstraint};
use kube::core::{ApiResource, Object};
use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// A pod.
pub type PodObject = Object<PodSpec, PodStatus>;
/// A node.
pub type NodeObject = Object<NodeSpec, NodeStatus>;

/// How to ask for [`PodObject`]s.
pub fn pods() -> ApiResource {
    ApiResource::erase::<k8s_openapi::api::core::v1::Pod>(&())
}

/// How to ask for [`NodeObject`]s.
pub fn nodes() -> ApiResource {
    ApiResource::erase::<k8s_openapi::api::core::v1::Node>(&())
}

/// `spec` of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodSpec {
    /// The node it is bound to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub node_name: Option<String>,
    /// Its init containers, in order.
    #[serde(deserialize_with = "null_is_default")]
    pub init_containers: Vec<Container>,
    /// Its containers.
    #[serde(deserialize_with = "null_is_default")]
    pub containers: Vec<Container>,
    /// `spec.overhead` of a RuntimeClass.
    #[serde(deserialize_with = "null_is_default")]
    pub overhead: Amounts,
    /// Which scheduler is to bind it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scheduler_name: Option<String>,
    /// What its PriorityClass says.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// Labels that its node must have.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "BTreeMap::is_empty")]
    pub node_selector: BTreeMap<String, String>,
    /// Which nodes and which pods it is to be with or away from.
    #[serde(skip_serializing)]
    pub affinity: Option<Box<Affinity>>,
    /// How it is to be spread.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub topology_spread_constraints: Vec<TopologySpreadConstraint>,
    /// Taints that it tolerates.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub tolerations: Vec<Toleration>,
    /// Until these are gone no scheduler looks at it.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub scheduling_gates: Vec<Named>,
    /// `Never`, or `PreemptLowerPriority`.
    #[serde(skip_serializing)]
    pub preemption_policy: Option<String>,
    /// Its volumes, as far as they decide where it can run.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub volumes: Vec<Volume>,
    /// Its ResourceClaims.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub resource_claims: Vec<Named>,
}

/// Something of which only the name is read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct Named {
    /// Its name.
    pub name: String,
}

/// A volume of a pod: only its claim is read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// The claim that it stands for.
    pub persistent_volume_claim: Option<VolumeClaim>,
    /// It is of a claim that is made for the pod and is named after pod and volume.
    pub ephemeral: Option<IgnoredAny>,
}

/// The claim of a [`Volume`].
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct VolumeClaim {
    /// Its name.
    pub claim_name: String,
}

/// A port of a container: only that of the host is read.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Port {
    /// 0 if it takes none.
    pub host_port: u16,
    /// Which of the host's addresses; empty: all.
    #[serde(rename = "hostIP")]
    pub host_ip: String,
    /// `TCP` if it is empty.
    pub protocol: String,
}

/// A container of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Container {
    /// Its name.
    pub name: String,
    /// `Always` makes an init container a sidecar.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub restart_policy: Option<String>,
    /// What it asks for.
    #[serde(deserialize_with = "null_is_default")]
    pub resources: Resources,
    /// Of its variables only `NVIDIA_VISIBLE_DEVICES`, if it is written out in the pod.
    #[serde(rename = "env", deserialize_with = "visible_devices", skip_serializing)]
    pub visible_devices: Option<String>,
    /// Its ports.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub ports: Vec<Port>,
}

/// `resources` of a container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Resources {
    /// Limits by resource name.
    #[serde(deserialize_with = "null_is_default")]
    pub limits: Amounts,
    /// Requests by resource name.
    #[serde(deserialize_with = "null_is_default")]
    pub requests: Amounts,
}

/// Amounts by resource, in the order of the names.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Amounts(Vec<(Resource, Amount)>);

/// The name of a resource. Of those that nearly every object has no copy is made.
type Resource = Cow<'static, str>;

impl Amounts {
    const COMMON: [&str; 7] = [
        names::GPU_COUNT,
        names::GPU_MEM,
        "cpu",
        "ephemeral-storage",
        "memory",
        names::WHOLE_GPU,
        "pods",
    ];

    /// The amount of a resource.
    pub fn get(&self, resource: &str) -> Option<&Amount> {
        let found = self.0.iter().find(|(name, _)| *name == resource);
        found.map(|(_, amount)| amount)
    }

    /// Whether there is an amount of a resource, whatever it is.
    pub fn contains_key(&self, resource: &str) -> bool {
        self.get(resource).is_some()
    }

    /// The resources.
    pub fn keys(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(name, _)| &**name)
    }

    /// The resources and their amounts.
    pub fn iter(&self) -> impl Iterator<Item = (&Resource, &Amount)> {
        self.0.iter().map(|(name, amount)| (name, amount))
    }

    /// Sets the amount of a resource.
    pub fn insert(&mut self, resource: &str, amount: Amount) {
        self.set(Amounts::name(resource), amount);
    }

    /// Keeps the amounts of these resources alone.
    pub fn retain(&mut self, wanted: impl Fn(&str) -> bool) {
        self.0.retain(|(name, _)| wanted(name));
    }

    /// Drops all.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    fn name(resource: &str) -> Resource {
        let common = Amounts::COMMON.into_iter().find(|name| *name == resource);
        common.map_or_else(|| Cow::Owned(resource.to_owned()), Cow::Borrowed)
    }

    fn set(&mut self, name: Resource, amount: Amount) {
        match self.0.binary_search_by(|(known, _)| known.cmp(&name)) {
            Ok(position) => self.0[position].1 = amount,
            Err(position) => self.0.insert(position, (name, amount)),
        }
    }
}

impl Serialize for Amounts {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (name, amount) in &self.0 {
            map.serialize_entry(name, amount)?;
        }
        map.end()
    }
}

impl<'de> Deserialize<'de> for Amounts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Amounts, D::Error> {
        struct Name(Resource);
        impl<'de> Deserialize<'de> for Name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Name, D::Error> {
                struct Known;
                impl Visitor<'_> for Known {
                    type Value = Name;

                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str("the name of a resource")
                    }

                    fn visit_str<E>(self, name: &str) -> Result<Name, E> {
                        Ok(Name(Amounts::name(name)))
                    }
                }
                deserializer.deserialize_str(Known)
            }
        }
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Amounts;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("a map of quantities")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Amounts, M::Error> {
                let mut amounts = Amounts::default();
                while let Some(Name(name)) = map.next_key()? {
                    amounts.set(name, map.next_value()?);
                }
                Ok(amounts)
            }
        }
        deserializer.deserialize_map(Read)
    }
}

/// A Quantity as it was written: a string, or a number as hand-written JSON has it.
#[derive(Debug, Clone, Serialize, PartialEq, Eq)]
#[serde(transparent)]
pub struct Amount(pub String);

impl<'de> Deserialize<'de> for Amount {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Text;
        impl serde::de::Visitor<'_> for Text {
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
        deserializer.deserialize_any(Text).map(Amount)
    }
}

/// `status` of a pod.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PodStatus {
    /// Its phase.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub phase: Option<String>,
    /// Why it is not scheduled, among others.
    #[serde(deserialize_with = "null_is_default")]
    pub conditions: Vec<Condition>,
    /// States of its init containers.
    #[serde(deserialize_with = "null_is_default")]
    pub init_container_statuses: Vec<ContainerStatus>,
    /// States of its containers.
    #[serde(deserialize_with = "null_is_default")]
    pub container_statuses: Vec<ContainerStatus>,
    /// The node where it has preempted others.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nominated_node_name: Option<String>,
    /// Why it failed, `UnexpectedAdmissionError`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The same in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// A condition of a pod or node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Condition {
    /// `PodScheduled`, `Ready`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False`, `Unknown`.
    pub status: String,
    /// One word.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// In words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// The status of one container.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerStatus {
    /// The container's name.
    pub name: String,
    /// What it does now.
    #[serde(deserialize_with = "null_is_default")]
    pub state: ContainerState,
}

/// One of the three is set.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct ContainerState {
    /// It runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub running: Option<Running>,
    /// It waits, and why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting: Option<Waiting>,
}

/// That a container runs; since when is not read.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Running {}

/// Why a container waits.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Waiting {
    /// `CreateContainerConfigError`, …
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// In words.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// `spec` of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeSpec {
    /// Cordoned.
    pub unschedulable: bool,
    /// Pods that do not tolerate these stay away.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub taints: Vec<Taint>,
}

/// `status` of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct NodeStatus {
    /// In all.
    #[serde(deserialize_with = "null_is_default")]
    pub capacity: Amounts,
    /// For pods.
    #[serde(deserialize_with = "null_is_default")]
    pub allocatable: Amounts,
    /// How to reach it.
    #[serde(deserialize_with = "null_is_default")]
    pub addresses: Vec<Address>,
    /// What runs on it.
    #[serde(rename = "nodeInfo", skip_serializing_if = "Option::is_none")]
    pub node_info: Option<NodeInfo>,
    /// Its conditions, without reasons and messages.
    #[serde(deserialize_with = "null_is_default", skip_serializing)]
    pub conditions: Vec<NodeCondition>,
}

/// A condition of a node.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
pub struct NodeCondition {
    /// `Ready`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// `True`, `False`, `Unknown`.
    pub status: String,
}

/// `status.nodeInfo` of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct NodeInfo {
    /// `containerd://2.1.4`
    pub container_runtime_version: String,
}

/// An address of a node.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Address {
    /// `InternalIP`, `Hostname`, …
    #[serde(rename = "type")]
    pub kind: String,
    /// The address.
    pub address: String,
}

/// One variable out of a container's `env`. The others are skipped: a pod may have hundreds.
fn visible_devices<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    #[derive(Deserialize)]
    struct Variable {
        #[serde(default)]
        name: IsVisibleDevices,
        #[serde(default)]
        value: Option<String>,
    }

    /// Whether a text is [`names::VISIBLE_DEVICES`].
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
            while let Some(variable) = variables.next_element::<Variable>()? {
                if variable.name.0 {
                    last = variable.value;
                }
            }
            Ok(last)
        }
    }
    deserializer.deserialize_option(Variables)
}

/// Go writes nil slices and maps as `null`.
pub fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
