//! Checks whether a spec was made for the driver that is loaded.
//!
//! A spec names the driver's libraries, and their file names contain the driver's version. A driver upgrade removes these files. Then containers fail
//! to start, or they run with libraries that the kernel module rejects (`Driver/library version mismatch`). Specs of other tools also contain device
//! numbers, which engines use without a look at the node; the kernel chooses most of NVIDIA's major numbers when the modules are loaded.

use std::collections::{BTreeMap, BTreeSet};

use divvy_host::{Root, Tree};

use super::{CdiMount, DeviceNode, Spec};

/// Prefixes of files that every NVIDIA driver has. The rest of the file name is the driver's version.
const VERSIONED: [&str; 2] = ["libcuda.so.", "libnvidia-ml.so."];

/// Device nodes, by the beginning of their path, and the names of their major number in `/proc/devices`; the first that matches counts. Sources:
/// `nvidia-modprobe-utils.c`, and the kernel's `Documentation/admin-guide/devices.txt`.
const MAJORS: [(&str, &[&str]); 7] = [
    ("/dev/nvidia-uvm", &["nvidia-uvm"]),
    ("/dev/nvidia-nvswitch", &["nvidia-nvswitch"]),
    ("/dev/nvidia-nvlink", &["nvidia-nvlink"]),
    ("/dev/nvidia-caps-imex-channels/", &["nvidia-caps-imex-channels"]),
    ("/dev/nvidia-caps/", &["nvidia-caps"]),
    ("/dev/nvidia", &["nvidia", "nvidia-frontend"]),
    ("/dev/dri/", &["drm"]),
];

/// Return the version of the driver that a spec was made for: from the annotation
/// [`DRIVER_VERSION`](crate::driver_version::DRIVER_VERSION) or, in specs of other tools, from the names of the mounted files.
pub fn driver_version(spec: &Spec) -> Option<&str> {
    if let Some(version) = spec.annotations.get(crate::driver_version::DRIVER_VERSION) {
        return Some(version);
    }
    spec.all_edits()
        .flat_map(|(_, edits)| &edits.mounts)
        .find_map(|mount| version_of_file(mount.host_path.rsplit('/').next()?))
}

/// The differences between a spec and a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Stale {
    /// The version of the driver that the spec was made for, and the version of the loaded driver, if they differ.
    pub driver: Option<(String, String)>,
    /// The files and device nodes that do not exist, each once. A container that gets one of them does not start.
    pub missing: Vec<String>,
    /// The device nodes whose numbers differ from those of the kernel, each with a text of both numbers.
    pub numbers: BTreeMap<String, String>,
}

impl Stale {
    /// Compare a spec with a machine. If no driver is loaded, only the paths are compared.
    pub fn check(spec: &Spec, tree: &dyn Tree) -> Stale {
        let Some(root) = Root::open(tree, "/") else {
            return Stale::default();
        };
        let loaded = match spec.vendor_and_class() {
            Some(("amd.com", _)) => root.text("/sys/module/amdgpu/version"),
            _ => crate::driver_version::loaded_driver(tree),
        };
        let driver = driver_version(spec).map(str::to_owned).zip(loaded);
        let majors = majors(&root);
        let nodes = spec.all_edits().flat_map(|(_, edits)| &edits.device_nodes);
        let numbers = nodes.filter_map(|node| Some((path_of(node).clone(), other_number(node, &root, &majors)?)));
        let missing = host_paths(spec).into_iter().filter(|path| root.resolve(path).is_none());
        Stale {
            driver: driver.filter(|(made_for, loaded)| made_for != loaded),
            missing: missing.cloned().collect(),
            numbers: numbers.collect(),
        }
    }

    /// Report whether the spec should be generated again.
    pub fn is_stale(&self) -> bool {
        *self != Stale::default()
    }

    /// Describe the differences, one sentence each, for messages.
    pub fn sentences(&self) -> Vec<String> {
        let driver = self
            .driver
            .as_ref()
            .map(|(made_for, loaded)| format!("it was made for driver {made_for}, and {loaded} is loaded"));
        let missing = match self.missing.as_slice() {
            [] => None,
            [one] => Some(format!("{one} does not exist, so containers do not start")),
            [first, rest @ ..] => Some(format!(
                "{first} and {} more do not exist, so containers do not start",
                rest.len()
            )),
        };
        let numbers = self.numbers.iter().map(|(path, numbers)| format!("{path} {numbers}"));
        driver.into_iter().chain(missing).chain(numbers).collect()
    }
}

/// Return the paths of files and device nodes on the machine that a spec names, each once.
pub fn host_paths(spec: &Spec) -> BTreeSet<&String> {
    let paths = spec.all_edits().flat_map(|(_, edits)| {
        let nodes = edits.device_nodes.iter().map(path_of);
        nodes.chain(
            edits
                .mounts
                .iter()
                .filter(|mount| is_bind(mount))
                .map(|mount| &mount.host_path),
        )
    });
    paths.collect()
}

/// Return a device node's path on the machine.
fn path_of(node: &DeviceNode) -> &String {
    node.host_path.as_ref().unwrap_or(&node.path)
}

/// Return the major numbers of character devices in `/proc/devices`, by name.
pub fn majors(root: &Root<'_>) -> BTreeMap<String, u32> {
    let text = root.text("/proc/devices").unwrap_or_default();
    let lines = text.lines().take_while(|line| !line.starts_with("Block"));
    lines
        .filter_map(|line| {
            let (major, name) = line.trim().split_once(' ')?;
            Some((name.to_owned(), major.parse().ok()?))
        })
        .collect()
}

/// Describe both numbers if a node of a spec has other ones than the kernel. An engine takes a node without a major number from the machine.
fn other_number(node: &DeviceNode, root: &Root<'_>, majors: &BTreeMap<String, u32>) -> Option<String> {
    let major = node.major.filter(|major| *major > 0)?;
    let minor = node.minor.unwrap_or(0);
    let path = path_of(node);
    // Below a driver container's root, the names are the same.
    let in_dev = path.find("/dev/").map_or(path.as_str(), |at| &path[at..]);
    let known = MAJORS.iter().find(|(start, _)| in_dev.starts_with(start));
    let named = known.and_then(|(_, names)| names.iter().find_map(|name| majors.get(*name).map(|major| i64::from(*major))));
    let of_node = root.device(path).map(|(major, minor)| (i64::from(major), i64::from(minor)));
    match (named, of_node) {
        (Some(named), _) if named != major => Some(format!("has major number {major} in the spec, and the kernel's is {named}")),
        (_, Some(real)) if real != (major, minor) => Some(format!(
            "is {major}:{minor} in the spec, and {}:{} on the machine",
            real.0, real.1
        )),
        _ => None,
    }
}

/// Report whether a mount's source is a path on the machine.
fn is_bind(mount: &CdiMount) -> bool {
    let bind = mount.options.iter().any(|option| option == "bind" || option == "rbind");
    bind || mount
        .kind
        .as_deref()
        .is_none_or(|kind| kind.is_empty() || kind == "none" || kind == "bind")
}

fn version_of_file(name: &str) -> Option<&str> {
    let version = VERSIONED.iter().find_map(|file| name.strip_prefix(file))?;
    crate::driver_version::is_version(version).then_some(version)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::driver_version::{DRIVER_VERSION, loaded_version};

    #[test]
    fn every_kernel_file_form_tells_the_loaded_version() {
        for (text, version) in [
            ("550.54.15\n", Some("550.54.15")),
            (
                "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu Oct 19 18:56:32 UTC 2023\nGCC version:  gcc version 11.4.0\n",
                Some("535.129.03"),
            ),
            (
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release Build  (root@x)  Thu\n",
                Some("570.86.10"),
            ),
            ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  470.82  Fri", Some("470.82")),
            ("", None),
            ("GCC version 1", None),
        ] {
            assert_eq!(loaded_version(text), version, "{text}");
        }
    }

    #[test]
    fn mounted_files_tell_a_foreign_specs_driver() {
        let mut spec = Spec::default();
        let mount = |path: &str| CdiMount {
            host_path: path.to_owned(),
            ..CdiMount::default()
        };
        spec.container_edits.mounts = vec![mount("/usr/lib64/libcuda.so.1"), mount("/usr/lib64/libfoo.so.1.2.3")];
        assert_eq!(driver_version(&spec), None);
        spec.container_edits
            .mounts
            .push(mount("/usr/lib64/libnvidia-ml.so.535.129.03"));
        assert_eq!(driver_version(&spec), Some("535.129.03"));
        spec.annotations.insert(DRIVER_VERSION.to_owned(), "550.54.15".to_owned());
        assert_eq!(driver_version(&spec), Some("550.54.15"));
    }
}
