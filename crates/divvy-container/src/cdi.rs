//! CDI specs (Container Device Interface, `cncf-tags/container-device-interface` SPEC.md 0.6.0): the types, the names
//! that DESIGN.md section 15 fixes, and the projection of a grant to the spec that the runtime reads.
//!
//! What a spec carries is applied by the runtime after the pod's own settings: a variable set here replaces the pod's
//! (research/reliability.md section 1.1), which is why the grant's variables live here and not in AllocateResponse.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::names::CDI_KIND;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use thiserror::Error as ThisError;

/// The version that grants are written in: the first with annotations on devices.
pub const VERSION: &str = "0.6.0";

/// Device annotation that carries the grant's record, so that a spec says whose it is.
pub const OWNER: &str = "divvy.dev/grant-record";

/// The kind under which NVIDIA's tools describe whole GPUs.
pub const NVIDIA_KIND: &str = "nvidia.com/gpu";

const PREFIX: &str = "divvy.dev-grant_";
const SUFFIX: &str = ".json";

/// What can be wrong with a CDI spec from outside.
#[derive(Debug, ThisError)]
pub enum Error {
    /// Not JSON, not YAML, or not a spec's shape.
    #[error("this is not a CDI spec: {0}")]
    Unreadable(String),
}

/// A CDI spec file. Fields that are not named here are kept in `other`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Spec {
    /// `cdiVersion`.
    #[serde(default)]
    pub cdi_version: String,
    /// `vendor/class`.
    pub kind: String,
    /// Annotations of the spec.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// The devices.
    #[serde(default)]
    pub devices: Vec<Device>,
    /// Edits that apply when any device of the spec is injected.
    #[serde(default, skip_serializing_if = "Edits::is_empty")]
    pub container_edits: Edits,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A device of a spec.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Device {
    /// The name after `vendor/class=`.
    pub name: String,
    /// Annotations of the device.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub annotations: BTreeMap<String, String>,
    /// Edits that apply when this device is injected.
    #[serde(default)]
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
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// OCI hooks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
    /// Mounts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Everything else (`intelRdt`, `additionalGids`).
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A device node in the container.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DeviceNode {
    /// Path in the container, and on the node unless `host_path` says another.
    pub path: String,
    /// Path on the node.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Type, numbers, mode, permissions, owner: the runtime reads them from the node where they are absent.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// A mount.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Mount {
    /// Path on the node.
    pub host_path: String,
    /// Path in the container.
    pub container_path: String,
    /// Mount options.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

/// An OCI hook.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Hook {
    /// `createContainer`, `createRuntime`, …
    pub hook_name: String,
    /// The program.
    pub path: String,
    /// Its arguments, the first being its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
    /// Its environment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub timeout: Option<i64>,
    /// Everything else.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Spec {
    /// Reads a spec: JSON if the text begins as an object, else YAML (`nvidia-ctk cdi generate` writes YAML).
    pub fn parse(text: &str) -> Result<Spec, Error> {
        if text.trim_start().starts_with('{') {
            serde_json::from_str(text).map_err(|error| Error::Unreadable(error.to_string()))
        } else {
            serde_saphyr::from_str(text).map_err(|error| Error::Unreadable(error.to_string()))
        }
    }

    /// The edits of one device of this spec: those of the spec, then those of the device.
    pub fn edits_of(&self, device: &str) -> Option<Edits> {
        let device = self.devices.iter().find(|candidate| candidate.name == device)?;
        let mut edits = self.container_edits.clone();
        edits.merge(&device.container_edits);
        Some(edits)
    }

    /// The annotation [`OWNER`] of the only device of a grant's spec.
    pub fn owner(&self) -> Option<&str> {
        match self.devices.as_slice() {
            [device] => device.annotations.get(OWNER).map(String::as_str),
            _ => None,
        }
    }
}

impl Edits {
    /// Whether nothing is edited.
    pub fn is_empty(&self) -> bool {
        self.env.is_empty()
            && self.device_nodes.is_empty()
            && self.hooks.is_empty()
            && self.mounts.is_empty()
            && self.other.is_empty()
    }

    /// Adds what `later` has and this has not. A variable of `later` replaces one of the same name; a device node or a mount
    /// for a path that is there already, and a hook that is there already, is left as it was.
    pub fn merge(&mut self, later: &Edits) {
        for variable in &later.env {
            let key = key_of(variable);
            self.env.retain(|present| key_of(present) != key);
            self.env.push(variable.clone());
        }
        for node in &later.device_nodes {
            if self.device_nodes.iter().all(|present| present.path != node.path) {
                self.device_nodes.push(node.clone());
            }
        }
        for hook in &later.hooks {
            if !self.hooks.contains(hook) {
                self.hooks.push(hook.clone());
            }
        }
        for mount in &later.mounts {
            if self
                .mounts
                .iter()
                .all(|present| present.container_path != mount.container_path)
            {
                self.mounts.push(mount.clone());
            }
        }
        for (key, value) in &later.other {
            match (self.other.get_mut(key), value) {
                (Some(Value::Array(present)), Value::Array(added)) => {
                    for value in added {
                        if !present.contains(value) {
                            present.push(value.clone());
                        }
                    }
                }
                (Some(_), _) => {}
                (None, _) => {
                    self.other.insert(key.clone(), value.clone());
                }
            }
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
            host_path: None,
            other: Map::new(),
        }
    }
}

/// What a grant's spec says.
#[derive(Debug, Clone, Default)]
pub struct GrantSpec<'a> {
    /// Device name: 32 hex digits ([`divvy_model::cdi_device_name`]).
    pub name: &'a str,
    /// The grant's record as one line of JSON: annotation [`OWNER`].
    pub owner: &'a str,
    /// Variables, in this order.
    pub env: &'a [(&'a str, String)],
    /// Device nodes by their path on the node.
    pub device_nodes: &'a [String],
    /// UUIDs of the granted GPUs: their edits under [`NVIDIA_KIND`] are merged in.
    pub gpus: &'a [&'a str],
    /// Specs of the node that may have such edits.
    pub base: &'a [Spec],
}

/// A grant's spec as text: one device, whose edits are the driver's files from `base` and then our own, so that ours win.
///
/// The version is [`VERSION`], or that of a merged spec where it is newer, since its fields may need it.
pub fn grant_spec(grant: &GrantSpec<'_>) -> String {
    let mut edits = Edits::default();
    let mut version = VERSION.to_owned();
    let mut seen = BTreeSet::new();
    for uuid in grant.gpus {
        for spec in grant.base.iter().filter(|spec| spec.kind == NVIDIA_KIND) {
            if seen.contains(uuid) {
                break;
            }
            if let Some(base) = spec.edits_of(uuid) {
                seen.insert(uuid);
                edits.merge(&base);
                if version_order(&spec.cdi_version) > version_order(&version) {
                    version.clone_from(&spec.cdi_version);
                }
            }
        }
    }
    edits.merge(&Edits {
        env: grant.env.iter().map(|(key, value)| format!("{key}={value}")).collect(),
        device_nodes: grant.device_nodes.iter().map(DeviceNode::of_node).collect(),
        ..Edits::default()
    });
    let spec = Spec {
        cdi_version: version,
        kind: CDI_KIND.to_owned(),
        annotations: BTreeMap::new(),
        devices: vec![Device {
            name: grant.name.to_owned(),
            annotations: BTreeMap::from([(OWNER.to_owned(), grant.owner.trim_end().to_owned())]),
            container_edits: edits,
            other: Map::new(),
        }],
        container_edits: Edits::default(),
        other: Map::new(),
    };
    let mut text = serde_json::to_string_pretty(&spec).expect("a spec has only string keys");
    text.push('\n');
    text
}

/// `1.2.3` as numbers; anything else sorts first.
fn version_order(version: &str) -> Option<(u32, u32, u32)> {
    let mut parts = version.split('.').map(|part| part.parse().ok());
    let order = (parts.next()??, parts.next()??, parts.next()??);
    parts.next().is_none().then_some(order)
}

/// Whether this can be the device name of a grant: 32 lower-case hex digits. Checked before a name from outside becomes
/// part of a path.
pub fn is_grant_name(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// `divvy.dev/grant=<name>`: what Allocate answers.
pub fn qualified_name(name: &str) -> String {
    format!("{CDI_KIND}={name}")
}

/// The name in `divvy.dev/grant=<name>`; `None` for other kinds and for names that no grant has.
pub fn grant_name(qualified: &str) -> Option<&str> {
    let name = qualified.strip_prefix(CDI_KIND)?.strip_prefix('=')?;
    is_grant_name(name).then_some(name)
}

/// `divvy.dev-grant_<name>.json`.
pub fn file_name(name: &str) -> String {
    format!("{PREFIX}{name}{SUFFIX}")
}

/// The name of a grant's spec file; `None` for every file that is not ours.
pub fn name_of_file(file: &str) -> Option<&str> {
    let name = file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    is_grant_name(name).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "0123456789abcdef0123456789abcdef";

    /// The shape that `nvidia-ctk cdi generate` writes, shortened.
    const NVIDIA: &str = r#"
cdiVersion: 0.7.0
kind: nvidia.com/gpu
devices:
  - name: "GPU-1"
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia0
          major: 195
          minor: 0
          fileMode: 438
          permissions: rw
  - name: all
    containerEdits:
      deviceNodes:
        - path: /dev/nvidia0
        - path: /dev/nvidia1
containerEdits:
  env:
    - NVIDIA_VISIBLE_DEVICES=all
    - NVIDIA_CTK=1
  additionalGids: [44]
  deviceNodes:
    - path: /dev/nvidiactl
  hooks:
    - hookName: createContainer
      path: /usr/bin/nvidia-cdi-hook
      args: [nvidia-cdi-hook, update-ldcache, --folder, /usr/lib64]
  mounts:
    - hostPath: /usr/lib64/libcuda.so.550.54.15
      containerPath: /usr/lib64/libcuda.so.550.54.15
      options: [ro, nosuid, nodev, bind]
"#;

    fn grant<'a>(base: &'a [Spec], env: &'a [(&'a str, String)], nodes: &'a [String]) -> GrantSpec<'a> {
        GrantSpec {
            name: NAME,
            owner: "{\"v\":1}\n",
            env,
            device_nodes: nodes,
            gpus: &["GPU-1"],
            base,
        }
    }

    #[test]
    fn a_grant_is_one_device_in_the_documented_form() {
        let env = [("A", "1".to_owned()), ("NVIDIA_VISIBLE_DEVICES", "void".to_owned())];
        let nodes = ["/dev/nvidia0".to_owned(), "/dev/nvidiactl".to_owned()];
        insta::assert_snapshot!(grant_spec(&grant(&[], &env, &nodes)), @r#"
        {
          "cdiVersion": "0.6.0",
          "kind": "divvy.dev/grant",
          "devices": [
            {
              "name": "0123456789abcdef0123456789abcdef",
              "annotations": {
                "divvy.dev/grant-record": "{\"v\":1}"
              },
              "containerEdits": {
                "env": [
                  "A=1",
                  "NVIDIA_VISIBLE_DEVICES=void"
                ],
                "deviceNodes": [
                  {
                    "path": "/dev/nvidia0"
                  },
                  {
                    "path": "/dev/nvidiactl"
                  }
                ]
              }
            }
          ]
        }
        "#);
    }

    #[test]
    fn the_drivers_files_are_merged_in_and_our_variables_win() {
        let base = [Spec::parse(NVIDIA).expect("nvidia-ctk's form")];
        let env = [("NVIDIA_VISIBLE_DEVICES", "void".to_owned())];
        let nodes = ["/dev/nvidia0".to_owned(), "/dev/nvidia-uvm".to_owned()];
        let spec = Spec::parse(&grant_spec(&grant(&base, &env, &nodes))).expect("own text");
        assert_eq!(spec.cdi_version, "0.7.0");
        let edits = &spec.devices[0].container_edits;
        assert_eq!(edits.env, ["NVIDIA_CTK=1", "NVIDIA_VISIBLE_DEVICES=void"]);
        let paths: Vec<_> = edits.device_nodes.iter().map(|node| node.path.as_str()).collect();
        assert_eq!(paths, ["/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm"]);
        assert_eq!(edits.device_nodes[1].other["fileMode"], 438, "unknown fields are kept");
        assert_eq!(edits.hooks.len(), 1);
        assert_eq!(edits.mounts.len(), 1);
        assert_eq!(edits.other["additionalGids"], serde_json::json!([44]));
    }

    #[test]
    fn a_gpu_that_the_node_has_no_spec_for_gets_only_our_edits() {
        let base = [Spec::parse(NVIDIA).expect("nvidia-ctk's form")];
        let mut grant = grant(&base, &[], &[]);
        grant.gpus = &["GPU-2"];
        let spec = Spec::parse(&grant_spec(&grant)).expect("own text");
        assert!(spec.devices[0].container_edits.is_empty());
        assert_eq!(spec.cdi_version, VERSION);
    }

    #[test]
    fn a_spec_says_whose_it_is() {
        let spec = Spec::parse(&grant_spec(&grant(&[], &[], &[]))).expect("own text");
        assert_eq!(spec.owner(), Some("{\"v\":1}"));
    }

    #[test]
    fn only_names_of_grants_become_paths() {
        assert_eq!(name_of_file(&file_name(NAME)), Some(NAME));
        assert_eq!(grant_name(&qualified_name(NAME)), Some(NAME));
        for foreign in [
            "nvidia.json",
            "divvy.dev-grant_.json",
            "divvy.dev-grant_0123456789ABCDEF0123456789abcdef.json",
            "divvy.dev-grant_../../../../../etc/passwd.json",
            "divvy.dev-gpu_0123456789abcdef0123456789abcdef.json",
        ] {
            assert_eq!(name_of_file(foreign), None, "{foreign}");
        }
        for foreign in [
            "nvidia.com/gpu=0",
            "divvy.dev/grant",
            "divvy.dev/grant=../../../../../../../../../etc/x",
        ] {
            assert_eq!(grant_name(foreign), None, "{foreign}");
        }
    }

    #[test]
    fn garbage_is_an_error() {
        for text in ["", "{", "[]", "{}", "kind: [", "{\"kind\":\"a/b\",\"devices\":7}"] {
            assert!(Spec::parse(text).is_err(), "{text:?}");
        }
    }
}
