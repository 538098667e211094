//! Resolution of CDI names to edits, as containerd does it whenever it creates a container: it reads the directory again, skips files that
//! are not valid specs with a log line, and does not resolve a name that two files define.
//!
//! Simplifications: there is one directory with one priority; hooks, rdt, network devices and additional groups are ignored; a device node
//! must exist under the node's root but may be a plain file.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde::Deserialize;

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct CdiSpec {
    cdi_version: String,
    kind: String,
    devices: Vec<SpecDevice>,
    container_edits: RuntimeEdits,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecDevice {
    name: String,
    #[serde(default)]
    container_edits: RuntimeEdits,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct RuntimeEdits {
    env: Vec<String>,
    device_nodes: Vec<RuntimeDeviceNode>,
    mounts: Vec<SpecMount>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RuntimeDeviceNode {
    path: String,
    #[serde(default)]
    host_path: String,
    #[serde(default, rename = "type")]
    kind: String,
    #[serde(default)]
    major: i64,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SpecMount {
    host_path: String,
    container_path: String,
    #[serde(default)]
    options: Vec<String>,
}

/// The edits of all names of one container, in order.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Resolved {
    /// Environment variables. Each replaces an earlier one of the same name.
    pub(crate) env: Vec<(String, String)>,
    /// The device nodes' paths in the container.
    pub(crate) devices: Vec<String>,
    /// The mounts: host path, container path, whether read-only.
    pub(crate) mounts: Vec<(String, String, bool)>,
}

/// Why names cannot be resolved, in containerd's words.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum InjectError {
    #[error("failed to inject CDI devices: unresolvable CDI devices {0}")]
    Unresolvable(String),
    #[error("failed to inject CDI devices: failed to stat CDI host device {0:?}: no such file or directory")]
    NoHostDevice(String),
}

/// Why a file is skipped.
#[derive(Debug, thiserror::Error)]
enum InvalidSpec {
    #[error(transparent)]
    Io(#[from] std::io::Error),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    #[error("invalid spec, no cdiVersion")]
    NoVersion,
    #[error("invalid kind {0:?}")]
    Kind(String),
    #[error("invalid spec, no devices")]
    NoDevices,
    #[error("invalid device name {0:?}")]
    DeviceName(String),
    #[error("invalid spec, multiple device {0:?}")]
    Twice(String),
}

/// Resolve qualified names `vendor/class=name`.
pub(crate) fn resolve(directory: &Path, host_root: &Path, names: &[String]) -> Result<Resolved, InjectError> {
    let mut resolved = Resolved::default();
    if names.is_empty() {
        return Ok(resolved);
    }
    let specs = read(directory);
    let mut devices: BTreeMap<String, (usize, &SpecDevice)> = BTreeMap::new();
    let mut conflicts = BTreeSet::new();
    for (i, (file, spec)) in specs.iter().enumerate() {
        for device in &spec.devices {
            let name = format!("{}={}", spec.kind, device.name);
            if devices.insert(name.clone(), (i, device)).is_some() {
                tracing::warn!(name, file, "the CDI device is defined twice and cannot be used");
                conflicts.insert(name);
            }
        }
    }
    let found = |name: &String| devices.get(name).filter(|_| !conflicts.contains(name));
    let missing: Vec<&str> = names
        .iter()
        .filter(|name| found(name).is_none())
        .map(String::as_str)
        .collect();
    if !missing.is_empty() {
        return Err(InjectError::Unresolvable(missing.join(", ")));
    }
    let mut used_specs = BTreeSet::new();
    for (spec, device) in names.iter().filter_map(found) {
        if used_specs.insert(*spec) {
            apply(&mut resolved, &specs[*spec].1.container_edits, host_root)?;
        }
        apply(&mut resolved, &device.container_edits, host_root)?;
    }
    Ok(resolved)
}

fn apply(resolved: &mut Resolved, edits: &RuntimeEdits, host_root: &Path) -> Result<(), InjectError> {
    for variable in &edits.env {
        let (name, value) = variable.split_once('=').unwrap_or((variable, ""));
        resolved.env.push((name.to_owned(), value.to_owned()));
    }
    for node in &edits.device_nodes {
        let host = if node.host_path.is_empty() {
            &node.path
        } else {
            &node.host_path
        };
        // Type and number are read from the host only if the spec does not contain them.
        let given = !node.kind.is_empty() && (node.major != 0 || node.kind == "p");
        if !given && !host_root.join(host.trim_start_matches('/')).exists() {
            return Err(InjectError::NoHostDevice(host.clone()));
        }
        resolved.devices.retain(|path| *path != node.path);
        resolved.devices.push(node.path.clone());
    }
    for mount in &edits.mounts {
        resolved.mounts.retain(|(_, container, _)| *container != mount.container_path);
        let read_only = mount.options.iter().any(|option| option == "ro");
        resolved
            .mounts
            .push((mount.host_path.clone(), mount.container_path.clone(), read_only));
    }
    Ok(())
}

fn read(directory: &Path) -> Vec<(String, CdiSpec)> {
    let mut paths: Vec<_> = match std::fs::read_dir(directory) {
        Ok(entries) => entries.flatten().map(|entry| entry.path()).collect(),
        Err(_) => Vec::new(),
    };
    paths.sort();
    let mut specs = Vec::new();
    for path in paths {
        if path.extension().is_none_or(|extension| extension != "json") {
            continue;
        }
        let file = path.display().to_string();
        match std::fs::read_to_string(&path)
            .map_err(InvalidSpec::from)
            .and_then(|text| parse(&text))
        {
            Ok(spec) => specs.push((file, spec)),
            Err(error) => tracing::warn!(file, %error, "skipped an invalid CDI spec"),
        }
    }
    specs
}

fn parse(text: &str) -> Result<CdiSpec, InvalidSpec> {
    let spec: CdiSpec = serde_json::from_str(text)?;
    if spec.cdi_version.is_empty() {
        return Err(InvalidSpec::NoVersion);
    }
    match spec.kind.split_once('/') {
        Some((vendor, class)) if !vendor.is_empty() && !class.is_empty() && !class.contains('/') => {}
        _ => return Err(InvalidSpec::Kind(spec.kind)),
    }
    if spec.devices.is_empty() {
        return Err(InvalidSpec::NoDevices);
    }
    let mut names = BTreeSet::new();
    for device in &spec.devices {
        let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ':');
        if device.name.is_empty() || !device.name.chars().all(inner) {
            return Err(InvalidSpec::DeviceName(device.name.clone()));
        }
        if !names.insert(&device.name) {
            return Err(InvalidSpec::Twice(device.name.clone()));
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, file: &str, text: &str) {
        std::fs::write(directory.join(file), text).expect("write");
    }

    #[test]
    fn names_are_resolved_from_what_the_directory_says_now() {
        let directory = tempfile::tempdir().expect("directory");
        let root = directory.path().join("root");
        std::fs::create_dir_all(root.join("dev")).expect("dev");
        let cdi = directory.path();
        let one = ["divvy.dev/grant=a".to_owned()];
        let unresolvable = || Err(InjectError::Unresolvable(one[0].clone()));
        assert_eq!(resolve(cdi, &root, &one), unresolvable());
        write(cdi, "broken.json", "{\"cdiVersion\":");
        let spec = r#"{"cdiVersion":"0.6.0","kind":"divvy.dev/grant","x":1,
            "containerEdits":{"env":["SPEC=1"]},
            "devices":[{"name":"a","containerEdits":{"env":["X=void"],"deviceNodes":[{"path":"/dev/nvidia0"}],
            "mounts":[{"hostPath":"/h","containerPath":"/c","options":["ro"]}],"hooks":[{}]}}]}"#;
        write(cdi, "a.json", spec);
        let no_node = Err(InjectError::NoHostDevice("/dev/nvidia0".to_owned()));
        assert_eq!(resolve(cdi, &root, &one), no_node);
        write(&root, "dev/nvidia0", "");
        let resolved = resolve(cdi, &root, &one).expect("resolved");
        assert_eq!(
            resolved.env,
            [("SPEC".to_owned(), "1".to_owned()), ("X".to_owned(), "void".to_owned())]
        );
        assert_eq!(resolved.devices, ["/dev/nvidia0"]);
        assert_eq!(resolved.mounts, [("/h".to_owned(), "/c".to_owned(), true)]);
        // Two files define the same name, so neither definition counts.
        write(cdi, "b.json", spec);
        assert_eq!(resolve(cdi, &root, &one), unresolvable());
    }
}
