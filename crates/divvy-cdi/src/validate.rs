//! Validates specs.
//!
//! An error is a problem for which the standard's own reader rejects the file. A warning is a violation of the standard's text that readers accept.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Map, Value};

use super::name::{check_class, check_device, check_vendor};
use super::version::needs;
use super::{CdiVersion, DeviceNode, Edits, Hook, Spec};
use divvy_host::plain;

/// The severity of a [`SpecProblem`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum ProblemSeverity {
    /// Readers accept the file in spite of the problem.
    Warning,
    /// Readers reject the file, so none of its devices is available.
    Error,
}

/// A problem of a spec.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpecProblem {
    /// Whether readers reject the file.
    pub severity: ProblemSeverity,
    /// The field with the problem, such as `devices[0].containerEdits.env[1]`.
    pub field: String,
    /// The value that was found, and the rule that it violates.
    pub text: String,
}

impl fmt::Display for SpecProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.field, self.text)
    }
}

/// The names of OCI hooks.
const HOOK_NAMES: [&str; 6] = [
    "prestart",
    "createRuntime",
    "createContainer",
    "startContainer",
    "poststart",
    "poststop",
];
/// The limit in bytes for all annotations of an object. The standard adopts this limit from Kubernetes.
const ANNOTATIONS_LIMIT: usize = 256 * 1024;

impl Spec {
    /// Return all problems of the spec, in the order of its fields.
    pub fn problems(&self) -> Vec<SpecProblem> {
        let mut found = SpecProblems::default();
        self.version_problems(&mut found);
        self.kind_problems(&mut found);
        found.annotations("annotations", &self.annotations);
        found.unknown("", &self.other);
        if self.devices.is_empty() {
            found.error("devices", "it is empty, but a spec must have at least one device");
        }
        let mut names = BTreeSet::new();
        for (i, device) in self.devices.iter().enumerate() {
            let field = format!("devices[{i}]");
            if let Err(error) = check_device(&device.name) {
                found.error(format!("{field}.name"), error.to_string());
            }
            if !names.insert(&device.name) {
                found.error(
                    format!("{field}.name"),
                    format!("two devices have the name {:?}, but each name must be unique", device.name),
                );
            }
            found.annotations(&format!("{field}.annotations"), &device.annotations);
            found.unknown(&field, &device.other);
            if device.container_edits.is_empty() {
                found.error(
                    format!("{field}.containerEdits"),
                    "it is empty, but a device must have at least one edit",
                );
            }
        }
        for (field, edits) in self.all_edits() {
            found.edits(&field, edits);
        }
        // Names and values come from the file, so they may contain terminal escapes.
        for problem in &mut found.0 {
            problem.field = plain(&problem.field).replace('\n', " ");
            problem.text = plain(&problem.text).replace('\n', " ");
        }
        found.0
    }

    /// Report whether readers that follow the standard accept the spec.
    pub fn is_valid(&self) -> bool {
        self.problems()
            .iter()
            .all(|problem| problem.severity != ProblemSeverity::Error)
    }

    fn version_problems(&self, found: &mut SpecProblems) {
        let text = &self.cdi_version;
        let Some(version) = CdiVersion::parse(text) else {
            let known = CdiVersion::ALL.map(CdiVersion::as_str).join(", ");
            return match text.trim_start_matches('v') {
                "0.1.0" | "0.2.0" => found.error(
                    "cdiVersion",
                    format!("the spec version must be at least v0.3.0, and it is {text}"),
                ),
                _ => found.error("cdiVersion", format!("invalid version {text:?}; known versions are {known}")),
            };
        };
        if let Some(need) = needs(self)
            .into_iter()
            .filter(|need| need.version > version)
            .max_by_key(|need| need.version)
        {
            found.error(
                "cdiVersion",
                format!(
                    "the spec version must be at least v{}, and it is {text}: {} has {}",
                    need.version, need.field, need.what
                ),
            );
        }
    }

    fn kind_problems(&self, found: &mut SpecProblems) {
        let Some((vendor, class)) = self.vendor_and_class() else {
            return found.error(
                "kind",
                format!("{:?} is not a kind; write VENDOR/CLASS, such as nvidia.com/gpu", self.kind),
            );
        };
        for checked in [check_vendor(vendor), check_class(class)] {
            if let Err(error) = checked {
                found.error("kind", error.to_string());
            }
        }
        if vendor.len() > 253 || class.len() > 63 {
            found.warning("kind", "a vendor has at most 253 characters, a class at most 63");
        }
    }
}

/// The problems found so far.
#[derive(Default)]
struct SpecProblems(Vec<SpecProblem>);

impl SpecProblems {
    fn add(&mut self, severity: ProblemSeverity, field: impl Into<String>, text: impl Into<String>) {
        self.0.push(SpecProblem {
            severity,
            field: field.into(),
            text: text.into(),
        });
    }

    fn error(&mut self, field: impl Into<String>, text: impl Into<String>) {
        self.add(ProblemSeverity::Error, field, text);
    }

    fn warning(&mut self, field: impl Into<String>, text: impl Into<String>) {
        self.add(ProblemSeverity::Warning, field, text);
    }

    fn unknown(&mut self, field: &str, other: &Map<String, Value>) {
        for key in other.keys() {
            let field = if field.is_empty() {
                key.clone()
            } else {
                format!("{field}.{key}")
            };
            self.error(
                field,
                "CDI up to 1.1.0 does not define this field, and readers reject a file with an unknown field",
            );
        }
    }

    fn annotations(&mut self, field: &str, annotations: &std::collections::BTreeMap<String, String>) {
        let size: usize = annotations.iter().map(|(key, value)| key.len() + value.len()).sum();
        if size > ANNOTATIONS_LIMIT {
            self.warning(
                field,
                format!("the keys and values have {size} bytes in total, but at most {ANNOTATIONS_LIMIT} are allowed"),
            );
        }
        for key in annotations.keys() {
            if !is_annotation_key(key) {
                self.warning(
                    format!("{field}[{key:?}]"),
                    "a key must follow Kubernetes' rules: an optional domain and slash, then a name of at most 63 letters, digits, `_`, `-`, and `.`",
                );
            }
        }
    }

    fn environment(&mut self, field: &str, env: &[String]) {
        for (i, variable) in env.iter().enumerate() {
            if variable.find('=').is_none_or(|at| at == 0) {
                self.error(
                    format!("{field}.env[{i}]"),
                    format!("{variable:?} is not a variable; write KEY=VALUE"),
                );
            }
        }
    }

    fn edits(&mut self, field: &str, edits: &Edits) {
        self.unknown(field, &edits.other);
        self.environment(field, &edits.env);
        for (i, node) in edits.device_nodes.iter().enumerate() {
            self.node(&format!("{field}.deviceNodes[{i}]"), node);
        }
        for (i, hook) in edits.hooks.iter().enumerate() {
            self.hook(&format!("{field}.hooks[{i}]"), hook);
        }
        for (i, mount) in edits.mounts.iter().enumerate() {
            let field = format!("{field}.mounts[{i}]");
            self.unknown(&field, &mount.other);
            for (name, path) in [("hostPath", &mount.host_path), ("containerPath", &mount.container_path)] {
                self.path(&format!("{field}.{name}"), path);
            }
            let earlier = &edits.mounts[..i];
            if earlier.iter().any(|other| other.container_path == mount.container_path) {
                self.warning(
                    format!("{field}.containerPath"),
                    "an earlier mount has the same path and is ignored",
                );
            }
        }
        self.interfaces(field, edits);
        if let Some(rdt) = &edits.intel_rdt {
            let field = format!("{field}.intelRdt");
            self.unknown(&field, &rdt.other);
            let id = rdt.clos_id.as_deref().unwrap_or_default();
            if id != "/" && (id.len() >= 4096 || id == "." || id == ".." || id.contains(['/', '\n'])) {
                self.error(format!("{field}.closID"), "it must be a file name, or / for the root class");
            }
        }
    }

    fn path(&mut self, field: &str, path: &str) {
        if path.is_empty() {
            self.error(field, "it is empty, but must be a path");
        } else if !path.starts_with('/') {
            self.warning(field, format!("{path:?} is not an absolute path"));
        }
    }

    fn node(&mut self, field: &str, node: &DeviceNode) {
        self.unknown(field, &node.other);
        self.path(&format!("{field}.path"), &node.path);
        if let Some(kind) = node.kind.as_deref().filter(|kind| !["", "b", "c", "u", "p"].contains(kind)) {
            self.error(format!("{field}.type"), format!("{kind:?} is not b, c, u or p"));
        }
        let permissions = node.permissions.as_deref().unwrap_or_default();
        if permissions != "none" && !permissions.chars().all(|c| "rwm".contains(c)) {
            self.error(
                format!("{field}.permissions"),
                format!("{permissions:?} is neither a combination of r, w, and m, nor none"),
            );
        }
    }

    fn hook(&mut self, field: &str, hook: &Hook) {
        self.unknown(field, &hook.other);
        if !HOOK_NAMES.contains(&hook.hook_name.as_str()) {
            self.error(
                format!("{field}.hookName"),
                format!("{:?} is not one of {}", hook.hook_name, HOOK_NAMES.join(", ")),
            );
        }
        self.path(&format!("{field}.path"), &hook.path);
        self.environment(field, &hook.env);
        if hook.timeout.is_some_and(|seconds| seconds <= 0) {
            self.warning(format!("{field}.timeout"), "it must be a number of seconds greater than 0");
        }
    }

    fn interfaces(&mut self, field: &str, edits: &Edits) {
        for (i, device) in edits.net_devices.iter().enumerate() {
            let field = format!("{field}.netDevices[{i}]");
            self.unknown(&field, &device.other);
            let earlier = &edits.net_devices[..i];
            for (name, value, twice) in [
                (
                    "hostInterfaceName",
                    &device.host_interface_name,
                    earlier
                        .iter()
                        .any(|other| other.host_interface_name == device.host_interface_name),
                ),
                ("name", &device.name, earlier.iter().any(|other| other.name == device.name)),
            ] {
                if value.is_empty() {
                    self.error(
                        format!("{field}.{name}"),
                        "it is empty, but must be the name of a network interface",
                    );
                } else if twice {
                    self.error(format!("{field}.{name}"), format!("{value:?} appears twice"));
                }
            }
        }
    }
}

fn is_annotation_key(key: &str) -> bool {
    let edges = |name: &str| {
        let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
        edge(name.chars().next()) && edge(name.chars().last())
    };
    let name_is_good =
        |name: &str| name.len() <= 63 && edges(name) && name.bytes().all(|c| c.is_ascii_alphanumeric() || b"_-.".contains(&c));
    let label = |label: &str| edges(label) && label.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'-');
    match key.split_once('/') {
        None => name_is_good(key),
        Some((domain, name)) => domain.len() <= 253 && domain.split('.').all(label) && name_is_good(name),
    }
}
