//! The types of a CDI spec, and how they are parsed from JSON and YAML and written.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use thiserror::Error as ThisError;

/// Why there is no CDI spec.
#[derive(Debug, Clone, ThisError)]
pub enum SpecError {
    /// The file has no readable text. Contains the reason.
    #[error("{0}")]
    NoText(String),
    /// The text is neither JSON nor YAML, or it does not have the structure of a spec. Contains the parser's message.
    #[error("this is not a CDI spec: {0}")]
    Unreadable(String),
}

/// A CDI spec. Unknown fields of the spec and of all its parts are kept in `other`. Readers reject files with unknown fields, and
/// [`Spec::problems`] reports them.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// The field `cdiVersion`, such as `0.6.0`.
    #[serde(default, deserialize_with = "or_default")]
    pub cdi_version: String,
    /// The kind of the devices, in the form `vendor/class`.
    pub kind: String,
    /// Annotations of the spec as a whole.
    #[serde(default, deserialize_with = "texts", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices that the spec describes.
    #[serde(default, deserialize_with = "or_default")]
    pub devices: Vec<CdiSpecDevice>,
    /// Edits that apply when any device of the spec is injected.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Edits::says_nothing")]
    pub container_edits: Edits,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A device of a spec.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a device")]
pub struct CdiSpecDevice {
    /// The name after `vendor/class=`.
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
    /// Annotations of the device.
    #[serde(default, deserialize_with = "texts", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Edits that apply when this device is injected.
    #[serde(default, deserialize_with = "or_default")]
    pub container_edits: Edits,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Changes to a container's OCI configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// Environment variables, in the form `KEY=value`. A variable replaces the pod's variable of the same name.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes that are created in the container.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces that are moved into the container; since 1.1.0.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// OCI hooks that are added to the container.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts that are added to the container.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<CdiMount>,
    /// Intel RDT: limits for the CPU's cache and memory bandwidth; since 0.7.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Additional groups of the container's process; 0 is ignored. Since 0.7.0.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A device node in the container. If type or numbers are absent, the container runtime reads them from the device on the node.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container. It is also the path on the node, unless `host_path` is set.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Path on the node, if it differs from `path`; since 0.5.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// The type: `b` (block device), `c` or `u` (character device), or `p` (FIFO).
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Major number of the device.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number of the device.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Permission bits, in decimal in a spec's text: 438 is 0666.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Access that the device cgroup allows: a combination of `r`, `w`, and `m`, or `none`. If absent, all access is allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// User ID of the owner in the container.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group ID in the container.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A network interface that is moved from the node into the container.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetDevice {
    /// The interface's name on the node.
    #[serde(default, deserialize_with = "or_default")]
    pub host_interface_name: String,
    /// The interface's name in the container.
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A mount into the container.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", expecting = "a mount")]
pub struct CdiMount {
    /// Path on the node, the source of the mount.
    #[serde(default, deserialize_with = "or_default")]
    pub host_path: String,
    /// Path in the container, the target of the mount.
    #[serde(default, deserialize_with = "or_default")]
    pub container_path: String,
    /// Mount options, such as `ro` and `rbind`.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// File system type, usually absent for bind mounts; since 0.4.0.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// An OCI hook: a program that the OCI runtime runs at a stage of the container's life cycle.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// The stage at which the hook runs, such as `createContainer` or `createRuntime`.
    #[serde(default, deserialize_with = "or_default")]
    pub hook_name: String,
    /// Absolute path of the program.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// The program's arguments, starting with its name (`argv[0]`).
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// The program's environment, in the form `KEY=value`.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Timeout in seconds.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Settings of Intel RDT (Resource Director Technology, resctrl in the kernel).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IntelRdt {
    /// Class of service: a directory name in resctrl, or `/` for the root class.
    #[serde(default, rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    /// Schema for the L3 cache, in resctrl's syntax.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l3_cache_schema: Option<String>,
    /// Schema for the memory bandwidth, in resctrl's syntax.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_bw_schema: Option<String>,
    /// Lines for the class's `schemata` file; since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schemata: Option<Vec<String>>,
    /// Whether resctrl monitors the container; since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_monitoring: Option<bool>,
    /// Unknown fields.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Deserialize `null` as the default value, because the standard's own reader treats `null` as an absent field.
fn or_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::<T>::deserialize(from)?.unwrap_or_default())
}

fn texts<'de, D: Deserializer<'de>>(from: D) -> Result<BTreeMap<String, String>, D::Error> {
    let found: BTreeMap<String, Option<String>> = or_default(from)?;
    Ok(found
        .into_iter()
        .map(|(key, value)| (key, value.unwrap_or_default()))
        .collect())
}

/// Deserialize an unquoted number. The standard's own reader treats a quoted number as a string and rejects it.
fn number<'de, D: Deserializer<'de>, T: TryFrom<i64>>(from: D) -> Result<Option<T>, D::Error> {
    struct NumberVisitor<T>(PhantomData<T>);
    impl<T: TryFrom<i64>> Visitor<'_> for NumberVisitor<T> {
        type Value = Option<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a number in the valid range")
        }

        fn visit_i64<E: de::Error>(self, value: i64) -> Result<Option<T>, E> {
            let fits = T::try_from(value).ok();
            fits.map(Some)
                .ok_or_else(|| E::invalid_value(Unexpected::Signed(value), &self))
        }

        fn visit_u64<E: de::Error>(self, value: u64) -> Result<Option<T>, E> {
            let signed = i64::try_from(value).map_err(|_| E::invalid_value(Unexpected::Unsigned(value), &self))?;
            self.visit_i64(signed)
        }

        fn visit_unit<E>(self) -> Result<Option<T>, E> {
            Ok(None)
        }
    }
    from.deserialize_any(NumberVisitor(PhantomData))
}

/// The format of a spec's text, which must match the file's extension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SpecFormat {
    /// JSON, for `.json` files.
    Json,
    /// YAML, for `.yaml` files.
    Yaml,
}

impl Spec {
    /// Parse a spec from JSON or YAML, independent of the file's extension. This does not validate the spec, see [`Spec::problems`].
    ///
    /// # Errors
    /// Fails if the text does not have the structure of a spec.
    pub fn parse(text: &str) -> Result<Spec, SpecError> {
        let json = if text.trim_start().starts_with('{') {
            match serde_json::from_str(text) {
                Ok(spec) => return Ok(spec),
                Err(error) => Some(error),
            }
        } else {
            None
        };
        // The standard's own reader parses JSON as YAML. In YAML any scalar can be read as a string, and 0666 is octal.
        let options = serde_saphyr::options! { legacy_octal_numbers: true, with_snippet: false };
        serde_saphyr::from_str_with_options(text, options)
            .map_err(|yaml| SpecError::Unreadable(json.map_or_else(|| yaml.to_string(), |json| json.to_string())))
    }

    /// Return the spec as text, with a line feed at the end.
    pub fn print(&self, format: SpecFormat) -> String {
        match format {
            SpecFormat::Json => {
                let mut text = serde_json::to_string_pretty(self).expect("a spec has only string keys");
                text.push('\n');
                text
            }
            SpecFormat::Yaml => {
                let text = serde_saphyr::to_string(self).expect("a spec has only string keys");
                format!("---\n{}\n", text.trim_end_matches('\n'))
            }
        }
    }

    /// Return the vendor and the class of the kind, if it has both.
    pub fn vendor_and_class(&self) -> Option<(&str, &str)> {
        let (vendor, class) = self.kind.split_once('/')?;
        (!vendor.is_empty() && !class.is_empty()).then_some((vendor, class))
    }

    /// Return the edits of a device: the spec's common edits merged with the device's own edits. Return `None` if the spec has no
    /// such device.
    pub fn edits_of(&self, device: &str) -> Option<Edits> {
        let device = self.devices.iter().find(|candidate| candidate.name == device)?;
        let mut edits = self.container_edits.clone();
        edits.merge(&device.container_edits);
        Some(edits)
    }

    /// Return all edits of the spec, each with its field name: `containerEdits`, then `devices[0].containerEdits` and so on.
    pub fn all_edits(&self) -> impl Iterator<Item = (String, &Edits)> {
        let devices = self.devices.iter().enumerate();
        let devices = devices.map(|(i, device)| (format!("devices[{i}].containerEdits"), &device.container_edits));
        std::iter::once(("containerEdits".to_owned(), &self.container_edits)).chain(devices)
    }
}

impl Edits {
    /// Report whether there are no edits. Unknown fields do not count.
    pub fn is_empty(&self) -> bool {
        self.env.is_empty()
            && self.device_nodes.is_empty()
            && self.net_devices.is_empty()
            && self.hooks.is_empty()
            && self.mounts.is_empty()
            && self.intel_rdt.is_none()
            && self.additional_gids.is_empty()
    }

    fn says_nothing(&self) -> bool {
        self.is_empty() && self.other.is_empty()
    }

    /// Merge `later` into these edits. A variable in `later` replaces an existing one of the same name. An existing device node or mount of the same
    /// path, and an existing equal hook, stay unchanged.
    pub fn merge(&mut self, later: &Edits) {
        for variable in &later.env {
            let key = key_of(variable);
            self.env.retain(|present| key_of(present) != key);
            self.env.push(variable.clone());
        }
        add(&mut self.device_nodes, &later.device_nodes, |a, b| a.path == b.path);
        add(&mut self.net_devices, &later.net_devices, |a, b| a.name == b.name);
        add(&mut self.hooks, &later.hooks, |a, b| a == b);
        add(&mut self.mounts, &later.mounts, |a, b| a.container_path == b.container_path);
        add(&mut self.additional_gids, &later.additional_gids, |a, b| a == b);
        if self.intel_rdt.is_none() {
            self.intel_rdt.clone_from(&later.intel_rdt);
        }
        for (key, value) in &later.other {
            self.other.entry(key.clone()).or_insert_with(|| value.clone());
        }
    }
}

fn add<T: Clone>(to: &mut Vec<T>, from: &[T], same: impl Fn(&T, &T) -> bool) {
    for added in from {
        if !to.iter().any(|present| same(present, added)) {
            to.push(added.clone());
        }
    }
}

fn key_of(variable: &str) -> &str {
    variable.split_once('=').map_or(variable, |(key, _)| key)
}

impl DeviceNode {
    /// Describe the device at a path of the node. The container runtime reads its type and numbers.
    pub fn of_node(path: impl Into<String>) -> DeviceNode {
        DeviceNode {
            path: path.into(),
            ..DeviceNode::default()
        }
    }
}
