//! An OCI `config.json` that is edited in place (runtime-spec 1.3). Everything that is not edited stays the same, byte for byte, including
//! unknown fields.
//!
//! The edits follow CDI (specification 1.1.0, `pkg/cdi/container-edits.go`):
//!
//! - An environment variable is replaced at its position, or appended.
//! - A device node replaces one with the same path, and the device cgroup gets a rule for it.
//! - A mount replaces mounts with the same destination. Afterwards all mounts are sorted so that parents come first.
//! - Hooks and groups are appended.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{DeserializeOwned, MapAccess, Visitor};
use serde::ser::SerializeMap as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::value::RawValue;
use serde_json::{Value, json};
use thiserror::Error as ThisError;

use super::request::RequestingContainer;
use divvy_cdi::{DeviceNode, Edits};

/// An error in a `config.json`, or in the edits that are applied to it.
#[derive(Debug, ThisError)]
pub enum BundleError {
    /// The text is not JSON, or does not follow the OCI runtime specification.
    #[error("config.json: {at}: {source}")]
    Shape {
        /// The part of the file, such as `linux.resources.devices`.
        at: String,
        /// The parser's error.
        source: serde_json::Error,
    },
    /// A device node does not exist, or is not a device.
    #[error("device node {path}: {source}")]
    Device {
        /// The node's path on the host.
        path: String,
        /// The problem.
        source: NoDevice,
    },
}

/// Why a path of the host does not have the device node that a container needs.
#[derive(Debug, ThisError)]
pub enum NoDevice {
    /// The system cannot read the path.
    #[error("{0}")]
    Unreadable(#[from] std::io::Error),
    /// There is another kind of file.
    #[error("it is not a device")]
    OtherFile,
    /// There is another kind of device.
    #[error("the CDI spec has type {spec:?}, but the node has {node:?}")]
    OtherType {
        /// The type in the CDI spec.
        spec: String,
        /// The type of the node.
        node: char,
    },
}

/// A device node of the host, as `lstat` reports it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostDevice {
    /// `c` for a character device, `b` for a block device, `p` for a named pipe.
    pub kind: char,
    /// The major number.
    pub major: u32,
    /// The minor number.
    pub minor: u32,
    /// The permission bits.
    pub mode: u32,
}

/// A JSON object that keeps the text and the order of its members.
#[derive(Debug, Clone, Default)]
struct OrderedObject(Vec<(String, Box<RawValue>)>);

impl<'de> Deserialize<'de> for OrderedObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<OrderedObject, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = OrderedObject;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<OrderedObject, A::Error> {
                let mut members = Vec::new();
                while let Some(member) = map.next_entry()? {
                    members.push(member);
                }
                Ok(OrderedObject(members))
            }
        }
        deserializer.deserialize_map(Members)
    }
}

impl Serialize for OrderedObject {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(Some(self.0.len()))?;
        for (key, value) in &self.0 {
            map.serialize_entry(key, value)?;
        }
        map.end()
    }
}

impl OrderedObject {
    /// Parse a member. Return the default if the member is missing or null. If several members have the same name, the last one
    /// counts, as in Go's decoder, which engines and runc use.
    fn read<T: DeserializeOwned + Default>(&self, key: &str, at: &str) -> Result<T, BundleError> {
        let Some((_, raw)) = self.0.iter().rev().find(|(name, _)| name == key) else {
            return Ok(T::default());
        };
        let read: Option<T> = serde_json::from_str(raw.get()).map_err(|source| BundleError::Shape {
            at: format!("{at}{key}"),
            source,
        })?;
        Ok(read.unwrap_or_default())
    }

    fn set<T: Serialize>(&mut self, key: &str, value: &T) -> Result<(), BundleError> {
        let shape = |source| BundleError::Shape {
            at: key.to_owned(),
            source,
        };
        let raw = serde_json::value::to_raw_value(value).map_err(shape)?;
        let last = self.0.iter().rposition(|(name, _)| name == key);
        match last {
            Some(last) => {
                self.0[last].1 = raw;
                let mut at = 0;
                self.0.retain(|(name, _)| {
                    at += 1;
                    name != key || at - 1 == last
                });
            }
            None => self.0.push((key.to_owned(), raw)),
        }
        Ok(())
    }
}

/// The current and the former name of NVIDIA's prestart hook. Engines search for programs with either name.
pub const LEGACY_HOOKS: [&str; 2] = ["nvidia-container-runtime-hook", "nvidia-container-toolkit"];

/// A container's `config.json`.
#[derive(Debug, Clone)]
pub struct Bundle {
    all: OrderedObject,
}

#[derive(Deserialize, Default)]
#[serde(default, expecting = "a process")]
struct BundleProcess {
    env: Vec<String>,
    capabilities: Option<Capabilities>,
    user: BundleUser,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Capabilities {
    bounding: Option<Vec<String>>,
}

#[derive(Deserialize, Default)]
#[serde(default, expecting = "a user")]
struct BundleUser {
    uid: u32,
    gid: u32,
}

#[derive(Deserialize, Default)]
#[serde(default, expecting = "a mount")]
struct BundleMount {
    source: String,
    destination: String,
}

impl Bundle {
    /// Parse the text of a `config.json`.
    ///
    /// # Errors
    /// [`BundleError::Shape`] if the text is not a JSON object.
    pub fn parse(text: &str) -> Result<Bundle, BundleError> {
        let all = serde_json::from_str(text).map_err(|source| BundleError::Shape {
            at: "the file".to_owned(),
            source,
        })?;
        Ok(Bundle { all })
    }

    /// Return the text of the file. Members that were not edited keep their text.
    pub fn text(&self) -> String {
        serde_json::to_string(&self.all).expect("an object of raw values can be written")
    }

    /// Return the path of the container's root directory: absolute, or relative to the bundle's directory.
    ///
    /// # Errors
    /// [`BundleError::Shape`] if the path is missing or invalid.
    pub fn root(&self) -> Result<String, BundleError> {
        let root: OrderedObject = self.all.read("root", "")?;
        let path: String = root.read("path", "root.")?;
        if path.is_empty() {
            Err(BundleError::Shape {
                at: "root.path".to_owned(),
                source: serde::de::Error::custom("it is missing"),
            })
        } else {
            Ok(path)
        }
    }

    /// Return the parts of the configuration that determine the container's devices.
    ///
    /// # Errors
    /// [`BundleError::Shape`] if a part does not follow the runtime specification.
    pub fn container(&self) -> Result<RequestingContainer, BundleError> {
        let process: BundleProcess = self.all.read("process", "")?;
        let mounts: Vec<BundleMount> = self.all.read("mounts", "")?;
        let bounding = process
            .capabilities
            .and_then(|capabilities| capabilities.bounding)
            .unwrap_or_default();
        let annotations: BTreeMap<String, String> = self.all.read("annotations", "")?;
        // CRI-O and podman add the hooks of a hooks directory to containers for which no one requested a GPU. Docker has no such directory.
        let of_docker = !annotations
            .keys()
            .any(|key| key.starts_with("io.kubernetes.") || key == "io.container.manager");
        Ok(RequestingContainer {
            env: process.env,
            mounts: mounts.into_iter().map(|mount| (mount.source, mount.destination)).collect(),
            by_engine: of_docker && self.prestart()?.iter().any(|hook| is_legacy(hook)),
            annotations,
            privileged: bounding.iter().any(|capability| capability == "CAP_SYS_ADMIN"),
        })
    }

    fn prestart(&self) -> Result<Vec<Box<RawValue>>, BundleError> {
        let hooks: OrderedObject = self.all.read("hooks", "")?;
        hooks.read("prestart", "hooks.")
    }

    /// Remove NVIDIA's legacy prestart hooks, which would add the devices a second time. Return whether there were any such
    /// hooks.
    ///
    /// # Errors
    /// [`BundleError::Shape`] if the hooks do not follow the runtime specification.
    pub fn remove_legacy_hooks(&mut self) -> Result<bool, BundleError> {
        let prestart = self.prestart()?;
        let left: Vec<&Box<RawValue>> = prestart.iter().filter(|hook| !is_legacy(hook)).collect();
        if left.len() == prestart.len() {
            return Ok(false);
        }
        let mut hooks: OrderedObject = self.all.read("hooks", "")?;
        hooks.set("prestart", &left)?;
        self.all.set("hooks", &hooks)?;
        Ok(true)
    }

    /// Apply the edits of the devices that the container gets. `look` returns the device node at a path of the host.
    ///
    /// # Errors
    /// [`BundleError`] if an edit cannot be applied. The bundle may then be partly edited, so the caller must discard it.
    pub fn apply(&mut self, edits: &Edits, look: impl Fn(&str) -> Result<HostDevice, NoDevice>) -> Result<(), BundleError> {
        let process: BundleProcess = self.all.read("process", "")?;
        self.environment(&edits.env)?;
        self.groups(edits)?;
        self.devices(&edits.device_nodes, &process.user, look)?;
        self.mounts(edits)?;
        self.hooks(edits)?;
        self.rest(edits)
    }

    fn environment(&mut self, edits: &[String]) -> Result<(), BundleError> {
        if edits.is_empty() {
            return Ok(());
        }
        let mut process: OrderedObject = self.all.read("process", "")?;
        let mut env: Vec<String> = process.read("env", "process.")?;
        for edit in edits {
            let key = edit.split_once('=').map_or(edit.as_str(), |(key, _)| key);
            let same = |entry: &String| entry.split_once('=').is_some_and(|(name, _)| name == key);
            match env.iter().position(same) {
                Some(first) => {
                    env[first].clone_from(edit);
                    let mut at = 0;
                    env.retain(|entry| {
                        at += 1;
                        at - 1 <= first || !same(entry)
                    });
                }
                None => env.push(edit.clone()),
            }
        }
        process.set("env", &env)?;
        self.all.set("process", &process)
    }

    fn groups(&mut self, edits: &Edits) -> Result<(), BundleError> {
        let added: Vec<u32> = edits.additional_gids.iter().copied().filter(|gid| *gid != 0).collect();
        if added.is_empty() {
            return Ok(());
        }
        let mut process: OrderedObject = self.all.read("process", "")?;
        let mut user: OrderedObject = process.read("user", "process.")?;
        let mut groups: Vec<u32> = user.read("additionalGids", "process.user.")?;
        for gid in added {
            if !groups.contains(&gid) {
                groups.push(gid);
            }
        }
        user.set("additionalGids", &groups)?;
        process.set("user", &user)?;
        self.all.set("process", &process)
    }

    fn devices(
        &mut self,
        nodes: &[DeviceNode],
        user: &BundleUser,
        look: impl Fn(&str) -> Result<HostDevice, NoDevice>,
    ) -> Result<(), BundleError> {
        if nodes.is_empty() {
            return Ok(());
        }
        let mut linux: OrderedObject = self.all.read("linux", "")?;
        let mut resources: OrderedObject = linux.read("resources", "linux.")?;
        let mut devices = with_paths(linux.read("devices", "linux.")?, "path");
        let mut rules: Vec<Box<RawValue>> = resources.read("devices", "linux.resources.")?;
        for node in nodes {
            let (device, rule) = in_container(node, user, &look)?;
            devices.retain(|(path, _)| path.as_deref() != Some(node.path.as_str()));
            devices.push((Some(node.path.clone()), raw(&device)?));
            rules.extend(rule.map(|rule| raw(&rule)).transpose()?);
        }
        linux.set("devices", &without_paths(devices))?;
        resources.set("devices", &rules)?;
        linux.set("resources", &resources)?;
        self.all.set("linux", &linux)
    }

    fn mounts(&mut self, edits: &Edits) -> Result<(), BundleError> {
        if edits.mounts.is_empty() {
            return Ok(());
        }
        let mut mounts = with_paths(self.all.read("mounts", "")?, "destination");
        for mount in &edits.mounts {
            mounts.retain(|(path, _)| path.as_deref() != Some(mount.container_path.as_str()));
            let mut new = json!({"destination": mount.container_path, "source": mount.host_path});
            if let Some(kind) = mount.kind.as_ref().filter(|kind| !kind.is_empty()) {
                new["type"] = json!(kind);
            }
            if !mount.options.is_empty() {
                new["options"] = json!(mount.options);
            }
            mounts.push((Some(mount.container_path.clone()), raw(&new)?));
        }
        mounts.sort_by_cached_key(|(path, _)| path.as_deref().map_or(0, parts));
        self.all.set("mounts", &without_paths(mounts))
    }

    fn hooks(&mut self, edits: &Edits) -> Result<(), BundleError> {
        if edits.hooks.is_empty() {
            return Ok(());
        }
        let mut hooks: OrderedObject = self.all.read("hooks", "")?;
        for hook in &edits.hooks {
            let mut stage: Vec<Box<RawValue>> = hooks.read(&hook.hook_name, "hooks.")?;
            let mut new = json!({"path": hook.path});
            if !hook.args.is_empty() {
                new["args"] = json!(hook.args);
            }
            if !hook.env.is_empty() {
                new["env"] = json!(hook.env);
            }
            if let Some(timeout) = hook.timeout {
                new["timeout"] = json!(timeout);
            }
            stage.push(raw(&new)?);
            hooks.set(&hook.hook_name, &stage)?;
        }
        self.all.set("hooks", &hooks)
    }

    fn rest(&mut self, edits: &Edits) -> Result<(), BundleError> {
        if edits.intel_rdt.is_none() && edits.net_devices.is_empty() {
            return Ok(());
        }
        let mut linux: OrderedObject = self.all.read("linux", "")?;
        if let Some(rdt) = &edits.intel_rdt {
            linux.set("intelRdt", rdt)?;
        }
        if !edits.net_devices.is_empty() {
            let mut devices: OrderedObject = linux.read("netDevices", "linux.")?;
            for net in &edits.net_devices {
                devices.set(&net.host_interface_name, &json!({"name": net.name}))?;
            }
            linux.set("netDevices", &devices)?;
        }
        self.all.set("linux", &linux)
    }
}

fn raw<T: Serialize>(value: &T) -> Result<Box<RawValue>, BundleError> {
    serde_json::value::to_raw_value(value).map_err(|source| BundleError::Shape {
        at: "the edits".to_owned(),
        source,
    })
}

/// Pair each entry with its path, so that each path is parsed only once. This saves time, because a driver has about a hundred
/// mounts.
fn with_paths(all: Vec<Box<RawValue>>, key: &str) -> Vec<(Option<String>, Box<RawValue>)> {
    all.into_iter().map(|raw| (path_of(&raw, key), raw)).collect()
}

fn without_paths(all: Vec<(Option<String>, Box<RawValue>)>) -> Vec<Box<RawValue>> {
    all.into_iter().map(|(_, raw)| raw).collect()
}

fn path_of(raw: &RawValue, key: &str) -> Option<String> {
    let members: BTreeMap<String, Value> = serde_json::from_str(raw.get()).ok()?;
    members.get(key)?.as_str().map(str::to_owned)
}

fn is_legacy(hook: &RawValue) -> bool {
    let path = path_of(hook, "path").unwrap_or_default();
    let name = path.rsplit('/').next().unwrap_or_default();
    LEGACY_HOOKS.contains(&name)
}

/// Count the components of a path.
fn parts(path: &str) -> usize {
    path.split('/').filter(|part| !part.is_empty() && *part != ".").count()
}

/// Return the device node for the container's configuration, and the rule for the container's device cgroup.
fn in_container(
    node: &DeviceNode,
    user: &BundleUser,
    look: &impl Fn(&str) -> Result<HostDevice, NoDevice>,
) -> Result<(Value, Option<Value>), BundleError> {
    let mut kind = node.kind.clone().filter(|kind| !kind.is_empty());
    let (mut major, mut minor, mut mode) = (node.major, node.minor, node.file_mode);
    let given = kind.is_some() && (major.is_some_and(|major| major != 0) || kind.as_deref() == Some("p"));
    let host = node
        .host_path
        .as_deref()
        .filter(|path| !path.is_empty())
        .unwrap_or(&node.path);
    // The kernel chooses a module's major number when it loads the module. A spec of another tool may have an older one.
    if given
        && let Ok(found) = look(host)
        && kind.as_deref().is_some_and(|kind| kind == found.kind.to_string())
    {
        major = Some(i64::from(found.major));
    }
    if !given {
        let wrong = |source| BundleError::Device {
            path: host.to_owned(),
            source,
        };
        let found = look(host).map_err(wrong)?;
        if let Some(kind) = kind
            .as_deref()
            .filter(|kind| *kind != "u" || found.kind != 'c')
            .filter(|kind| *kind != found.kind.to_string())
        {
            return Err(wrong(NoDevice::OtherType {
                spec: kind.to_owned(),
                node: found.kind,
            }));
        }
        kind.get_or_insert_with(|| found.kind.to_string());
        (major, minor) = (Some(i64::from(found.major)), Some(i64::from(found.minor)));
        mode = mode.or(Some(found.mode));
    }
    let kind = kind.unwrap_or_default();
    let mut device = json!({"path": node.path, "type": kind, "major": major.unwrap_or(0), "minor": minor.unwrap_or(0)});
    if let Some(mode) = mode {
        device["fileMode"] = json!(mode);
    }
    for (key, given, own) in [("uid", node.uid, user.uid), ("gid", node.gid, user.gid)] {
        let id = given.or((own > 0).then_some(own));
        if let Some(id) = id {
            device[key] = json!(id);
        }
    }
    let access = match node.permissions.as_deref() {
        None | Some("") => "rwm",
        Some("none") => "",
        Some(permissions) => permissions,
    };
    let has_rule = matches!(kind.as_str(), "c" | "b" | "u");
    let rule = json!({
        "allow": true,
        "type": if kind == "u" { "c" } else { &kind },
        "major": major.unwrap_or(0),
        "minor": minor.unwrap_or(0),
        "access": access,
    });
    Ok((device, has_rule.then_some(rule)))
}
