//! The CDI spec of a grant, and the names of its device and file (`docs/design/formats.md`). The agent writes this spec just before the container
//! starts, and the container runtime reads it.

use std::collections::{BTreeMap, BTreeSet};

use divvy_model::names::CDI_KIND;

use super::{CdiMount, CdiSpecDevice, CdiVersion, DeviceNode, Edits, Spec, SpecFormat};
use crate::shadow::Shadow;

/// The CDI version of a grant's spec: the first version with annotations on devices.
pub const VERSION: &str = "0.6.0";

/// The device annotation with the grant's record, so that a spec shows which container it belongs to.
pub const OWNER: &str = "divvy.dev/grant-record";

const PREFIX: &str = "divvy.dev-grant_";
const SUFFIX: &str = ".json";

impl Spec {
    /// Return the value of the annotation [`OWNER`], if the spec has exactly one device and that device has the annotation.
    pub fn owner(&self) -> Option<&str> {
        match self.devices.as_slice() {
            [device] => device.annotations.get(OWNER).map(String::as_str),
            _ => None,
        }
    }
}

/// The input of [`grant_spec`].
#[derive(Debug, Clone, Default)]
pub struct GrantSpec<'a> {
    /// The device name: 32 hex digits ([`divvy_model::cdi_device_name`]).
    pub name: &'a str,
    /// The grant's record as one line of JSON, for the annotation [`OWNER`].
    pub owner: &'a str,
    /// The environment variables, in the order in which they are written.
    pub env: &'a [(&'a str, String)],
    /// The device nodes, as paths on the node.
    pub device_nodes: &'a [String],
    /// Directories that the container can write: the path on the node, and the path in the container.
    pub mounts: &'a [(String, String)],
    /// Additional groups of the container's process.
    pub groups: &'a [u32],
    /// The UUIDs of the granted GPUs.
    pub gpus: &'a [&'a str],
    /// The kind of those specs in `base` whose edits for these GPUs are merged in. With `None`, no edits are merged in.
    pub libraries: Option<&'a str>,
    /// The node's specs, some of which may have edits for these GPUs.
    pub base: &'a [Spec],
    /// What the container gets in the place of the driver's libraries. It has no effect if `base` provides none of them.
    pub shadow: Option<&'a Shadow>,
}

/// Return a grant's spec as JSON text. It has one device, whose edits are those of the GPUs in `base`, followed by the grant's own edits. Therefore
/// the grant's environment variables win.
///
/// The version is [`VERSION`], or a higher one that the merged fields need. If `base` has a spec of an unknown later version, that version is kept,
/// because unknown fields may need it.
pub fn grant_spec(grant: &GrantSpec<'_>) -> String {
    let mut edits = Edits::default();
    let mut declared = None;
    let mut seen = BTreeSet::new();
    for uuid in grant.gpus {
        for spec in grant.base.iter().filter(|spec| grant.libraries == Some(spec.kind.as_str())) {
            if seen.contains(uuid) {
                break;
            }
            if let Some(base) = spec.edits_of(uuid) {
                seen.insert(uuid);
                edits.merge(&base);
                if CdiVersion::is_to_come(&spec.cdi_version) {
                    declared = Some(spec.cdi_version.clone());
                }
            }
        }
    }
    if let Some(shadow) = grant.shadow {
        edits.shadow(shadow);
    }
    edits.merge(&Edits {
        env: grant.env.iter().map(|(key, value)| format!("{key}={value}")).collect(),
        device_nodes: grant.device_nodes.iter().map(DeviceNode::of_node).collect(),
        mounts: grant.mounts.iter().map(mount).collect(),
        additional_gids: grant.groups.to_vec(),
        ..Edits::default()
    });
    let mut spec = Spec {
        cdi_version: String::new(),
        kind: CDI_KIND.to_owned(),
        devices: vec![CdiSpecDevice {
            name: grant.name.to_owned(),
            annotations: BTreeMap::from([(OWNER.to_owned(), grant.owner.trim_end().to_owned())]),
            container_edits: edits,
            ..CdiSpecDevice::default()
        }],
        ..Spec::default()
    };
    spec.cdi_version = declared.unwrap_or_else(|| CdiVersion::least_for(&spec).to_string());
    spec.print(SpecFormat::Json)
}

fn mount((host, container): &(String, String)) -> CdiMount {
    CdiMount {
        host_path: host.clone(),
        container_path: container.clone(),
        options: ["rw", "nosuid", "nodev", "noexec", "rbind"].map(str::to_owned).to_vec(),
        ..CdiMount::default()
    }
}

/// Report whether a text has the form of a grant's device name: 32 lower-case hex digits. Check this before an untrusted name becomes part of a
/// path.
pub fn is_grant_name(name: &str) -> bool {
    name.len() == 32 && name.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
}

/// Return the qualified CDI name `divvy.dev/grant=<name>`, which the agent returns from Allocate.
pub fn qualified_name(name: &str) -> String {
    format!("{CDI_KIND}={name}")
}

/// Return the name in `divvy.dev/grant=<name>`, or `None` for another kind or an invalid name.
pub fn grant_name(qualified: &str) -> Option<&str> {
    let name = qualified.strip_prefix(CDI_KIND)?.strip_prefix('=')?;
    is_grant_name(name).then_some(name)
}

/// Return the file name of a grant's spec: `divvy.dev-grant_<name>.json`.
pub fn file_name(name: &str) -> String {
    format!("{PREFIX}{name}{SUFFIX}")
}

/// Return the device name in the file name of a grant's spec, or `None` for any other file.
pub fn name_of_file(file: &str) -> Option<&str> {
    let name = file.strip_prefix(PREFIX)?.strip_suffix(SUFFIX)?;
    is_grant_name(name).then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    const NAME: &str = "0123456789abcdef0123456789abcdef";

    /// A shortened spec in the form that `nvidia-ctk cdi generate` writes.
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
            mounts: &[],
            groups: &[],
            libraries: Some(crate::NVIDIA_KIND),
            gpus: &["GPU-1"],
            base,
            shadow: None,
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
        assert_eq!(edits.device_nodes[1].file_mode, Some(438));
        assert_eq!(edits.hooks.len(), 1);
        assert_eq!(edits.mounts.len(), 1);
        assert_eq!(edits.additional_gids, [44]);
    }

    #[test]
    fn nothing_in_a_directory_that_a_container_may_write_can_be_run() {
        let mut grant = grant(&[], &[], &[]);
        let mounts = [("/run/nvidia/mps/shm".to_owned(), "/dev/shm".to_owned())];
        grant.mounts = &mounts;
        let spec = Spec::parse(&grant_spec(&grant)).expect("own text");
        let options = &spec.devices[0].container_edits.mounts[0].options;
        assert_eq!(options, &["rw", "nosuid", "nodev", "noexec", "rbind"]);
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
