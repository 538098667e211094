//! The types of a CDI spec, and their text.

use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;

use serde::de::{self, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};
use thiserror::Error as ThisError;

/// What can be wrong with a CDI spec from outside.
#[derive(Debug, ThisError)]
pub enum Error {
    /// Not JSON, not YAML, or not a spec's shape.
    #[error("this is not a CDI spec: {0}")]
    Unreadable(String),
}

/// A CDI spec file. Fields that are not named here are kept in `other`, here and in all parts; no reader of the standard takes
/// them, which [`Spec::problems`] says.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// `cdiVersion`.
    #[serde(default, deserialize_with = "or_default")]
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    /// Annotations of the spec.
    #[serde(default, deserialize_with = "texts", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices.
    #[serde(default, deserialize_with = "or_default")]
    pub devices: Vec<Device>,
    /// Edits that apply when any device of the spec is injected.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Edits::says_nothing")]
    pub container_edits: Edits,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A device of a spec.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// The name after `vendor/class=`.
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
    /// Annotations of the device.
    #[serde(default, deserialize_with = "texts", skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Edits that apply when this device is injected.
    #[serde(default, deserialize_with = "or_default")]
    pub container_edits: Edits,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Changes to a container's OCI configuration.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Edits {
    /// `KEY=value`; replaces the pod's own value of the key.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Network interfaces that are moved into the container; since 1.1.0.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub net_devices: Vec<NetDevice>,
    /// OCI hooks.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Cache and memory bandwidth of the processor; since 0.7.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intel_rdt: Option<IntelRdt>,
    /// Groups of the container's process besides its own, 0 being ignored; since 0.7.0.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub additional_gids: Vec<u32>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A device node in the container. Type and numbers are read by the runtime from the node where they are absent.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container, and on the node unless `host_path` says another.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Path on the node; since 0.5.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// `b`, `c`, `u` or `p`.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Major number.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub major: Option<i64>,
    /// Minor number.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub minor: Option<i64>,
    /// Mode bits: 438 is 0666.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub file_mode: Option<u32>,
    /// Of the device cgroup: some of `rwm`, or `none`; all when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub permissions: Option<String>,
    /// Owner in the container.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub uid: Option<u32>,
    /// Group in the container.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub gid: Option<u32>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A network interface.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct NetDevice {
    /// Its name on the node.
    #[serde(default, deserialize_with = "or_default")]
    pub host_interface_name: String,
    /// Its name in the container.
    #[serde(default, deserialize_with = "or_default")]
    pub name: String,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A mount.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Path on the node.
    #[serde(default, deserialize_with = "or_default")]
    pub host_path: String,
    /// Path in the container.
    #[serde(default, deserialize_with = "or_default")]
    pub container_path: String,
    /// Mount options.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// Type of file system; since 0.4.0.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// An OCI hook.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// `createContainer`, `createRuntime`, …
    #[serde(default, deserialize_with = "or_default")]
    pub hook_name: String,
    /// The program.
    #[serde(default, deserialize_with = "or_default")]
    pub path: String,
    /// Its arguments, the first being its name.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(default, deserialize_with = "or_default", skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds.
    #[serde(default, deserialize_with = "number", skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// Settings of Intel's resource director technology (resctrl).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct IntelRdt {
    /// Class of service; a file's name, or `/`.
    #[serde(default, rename = "closID", skip_serializing_if = "Option::is_none")]
    pub clos_id: Option<String>,
    /// Share of the L3 cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub l3_cache_schema: Option<String>,
    /// Share of the memory's bandwidth.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mem_bw_schema: Option<String>,
    /// Lines of the class's schemata; since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schemata: Option<Vec<String>>,
    /// Whether the container is watched; since 1.1.0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub enable_monitoring: Option<bool>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A field that is `null` counts as absent: that is how the standard's own reader takes it.
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

/// A number that is not quoted: quoted ones are texts for the standard's reader, and refused.
fn number<'de, D: Deserializer<'de>, T: TryFrom<i64>>(from: D) -> Result<Option<T>, D::Error> {
    struct Number<T>(PhantomData<T>);
    impl<T: TryFrom<i64>> Visitor<'_> for Number<T> {
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
    from.deserialize_any(Number(PhantomData))
}

/// How a spec is written: by the ending of its file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// `.json`
    Json,
    /// `.yaml`
    Yaml,
}

impl Spec {
    /// Reads a spec: JSON or YAML, whatever its file is called. Whether it is valid is another question: [`Spec::problems`].
    ///
    /// # Errors
    /// It has not the shape of a spec.
    pub fn parse(text: &str) -> Result<Spec, Error> {
        let json = match text.trim_start().starts_with('{') {
            true => match serde_json::from_str(text) {
                Ok(spec) => return Ok(spec),
                Err(error) => Some(error),
            },
            false => None,
        };
        // The standard's own reader takes JSON for YAML, in which any scalar can be a text; and 0666 is octal for it.
        let options = serde_saphyr::options! { legacy_octal_numbers: true, with_snippet: false };
        serde_saphyr::from_str_with_options(text, options)
            .map_err(|yaml| Error::Unreadable(json.map_or_else(|| yaml.to_string(), |json| json.to_string())))
    }

    /// The spec's text, which ends with a line break.
    pub fn print(&self, format: Format) -> String {
        match format {
            Format::Json => {
                let mut text = serde_json::to_string_pretty(self).expect("a spec has only string keys");
                text.push('\n');
                text
            }
            Format::Yaml => {
                let text = serde_saphyr::to_string(self).expect("a spec has only string keys");
                format!("---\n{}\n", text.trim_end_matches('\n'))
            }
        }
    }

    /// Vendor and class of the kind, if it has both.
    pub fn vendor_and_class(&self) -> Option<(&str, &str)> {
        let (vendor, class) = self.kind.split_once('/')?;
        (!vendor.is_empty() && !class.is_empty()).then_some((vendor, class))
    }

    /// The edits of one device of this spec: those of the spec, then those of the device.
    pub fn edits_of(&self, device: &str) -> Option<Edits> {
        let device = self.devices.iter().find(|candidate| candidate.name == device)?;
        let mut edits = self.container_edits.clone();
        edits.merge(&device.container_edits);
        Some(edits)
    }

    /// All edits of the spec with the field that they are in.
    pub fn all_edits(&self) -> impl Iterator<Item = (String, &Edits)> {
        let devices = self.devices.iter().enumerate();
        let devices = devices.map(|(i, device)| (format!("devices[{i}].containerEdits"), &device.container_edits));
        std::iter::once(("containerEdits".to_owned(), &self.container_edits)).chain(devices)
    }
}

impl Edits {
    /// Whether nothing that the standard knows is edited.
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

    /// Adds what `later` has and this has not. A variable of `later` replaces one of the same name; a device node or a mount
    /// for a path that is there already, and a hook that is there already, is left as it was.
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
    /// The node's own device at this path, with its own numbers.
    pub fn of_node(path: impl Into<String>) -> DeviceNode {
        DeviceNode {
            path: path.into(),
            ..DeviceNode::default()
        }
    }
}
