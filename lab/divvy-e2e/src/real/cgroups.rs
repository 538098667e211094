//! The kernel's knowledge of containers: evidence that does not depend on any component under test.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use divvy_testbed::scenario::{Living, is_of_a_gpu};
use divvy_testbed::simulated_driver;

/// Report whether a container's cgroup has a process. `prefix` and `node` together are the name of the cgroup below which the
/// node's kubelet keeps its pods.
pub(super) fn is_populated(prefix: &str, node: &str, pod_uid: &str, container_id: &str) -> bool {
    ["", "besteffort/", "burstable/"].iter().any(|qos| {
        let below = format!("{prefix}-{node}/kubepods/{qos}pod{pod_uid}/{container_id}/cgroup.procs");
        // Version 1 has a hierarchy per controller, version 2 a single one.
        ["pids/", ""].iter().any(|hierarchy| {
            let path = PathBuf::from(format!("/sys/fs/cgroup/{hierarchy}{below}"));
            std::fs::read_to_string(path).is_ok_and(|pids| !pids.trim().is_empty())
        })
    })
}

/// An inspector of processes of the test image, in pods on a cluster's nodes. It considers only processes that wait until they
/// are ended (`/probe run`).
pub(super) struct Inspector {
    directory: PathBuf,
    prefix: String,
    /// The names of containers by id, so that the runtime's files are read only once.
    names: BTreeMap<String, String>,
}

impl Inspector {
    pub(super) fn new(directory: &Path, prefix: &str) -> Inspector {
        Inspector {
            directory: directory.to_owned(),
            prefix: prefix.to_owned(),
            names: BTreeMap::new(),
        }
    }

    pub(super) fn inspect(&mut self) -> io::Result<Vec<Living>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir("/proc")? {
            let path = entry?.path();
            let is_process = path
                .file_name()
                .is_some_and(|name| name.to_string_lossy().bytes().all(|byte| byte.is_ascii_digit()));
            // A process that cannot be read has just ended.
            if is_process && let Some(living) = self.inspect_process(&path) {
                found.push(living);
            }
        }
        Ok(found)
    }

    fn inspect_process(&mut self, process: &Path) -> Option<Living> {
        let command = std::fs::read(process.join("cmdline")).ok()?;
        if !command.starts_with(b"/probe\0run") {
            return None;
        }
        let cgroups = std::fs::read_to_string(process.join("cgroup")).ok()?;
        let (node, pod_uid, id) = place(&cgroups, &self.prefix)?;
        let env = std::fs::read(process.join("environ")).ok()?;
        let env = variables(&String::from_utf8_lossy(&env))?;
        let in_dev = simulated_driver::names(&process.join("root/dev")).ok()?.into_iter();
        let in_dri = simulated_driver::names(&process.join("root/dev/dri")).ok()?.into_iter();
        let paths = in_dev.map(|name| format!("/dev/{name}"));
        let mut devices: Vec<String> = paths
            .chain(in_dri.map(|name| format!("/dev/dri/{name}")))
            .filter(|path| is_of_a_gpu(path))
            .collect();
        devices.sort();
        let container = self.name_of(&node, &id)?;
        Some(Living {
            node,
            pod_uid,
            container,
            id,
            devices,
            env,
        })
    }

    /// Return the container's name as the runtime received it.
    fn name_of(&mut self, node: &str, id: &str) -> Option<String> {
        if let Some(name) = self.names.get(id) {
            return Some(name.clone());
        }
        let bundle = format!("{node}/run/containerd/io.containerd.runtime.v2.task/k8s.io/{id}/config.json");
        let config = std::fs::read(self.directory.join(bundle)).ok()?;
        let config: serde_json::Value = serde_json::from_slice(&config).ok()?;
        let name = config["annotations"]["io.kubernetes.cri.container-name"].as_str()?.to_owned();
        self.names.insert(id.to_owned(), name.clone());
        Some(name)
    }
}

/// Return the node, pod, and container of a line such as `7:pids:/divvy-test-26000-n1/kubepods/besteffort/pod0a1b/c0ffee`.
fn place(cgroups: &str, prefix: &str) -> Option<(String, String, String)> {
    cgroups.lines().find_map(|line| {
        let (_, below) = line.split_once(&format!("/{prefix}-"))?;
        let (node, rest) = below.split_once('/')?;
        let mut parts = rest.split('/');
        let pod = parts.find_map(|part| part.strip_prefix("pod"))?;
        Some((node.to_owned(), pod.to_owned(), parts.next()?.to_owned()))
    })
}

/// Return the variables in a file `environ`. `None` for a process that is just being created, and has none yet, and for one that ended while the file was
/// read, so that the last variable is cut.
fn variables(environ: &str) -> Option<BTreeMap<String, String>> {
    let pairs = environ
        .strip_suffix('\0')?
        .split('\0')
        .filter_map(|pair| pair.split_once('='));
    Some(pairs.map(|(key, value)| (key.to_owned(), value.to_owned())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_found_in_its_node_and_pod() {
        let cgroups = "8:cpu:/elsewhere\n7:pids:/divvy-test-26000-n2/kubepods/burstable/pod0a-1b/c0ffee\n";
        assert_eq!(
            place(cgroups, "divvy-test-26000"),
            Some(("n2".to_owned(), "0a-1b".to_owned(), "c0ffee".to_owned()))
        );
        assert_eq!(place(cgroups, "divvy-test-2600"), None);
        assert_eq!(place("7:pids:/divvy-test-26000-n2/system\n", "divvy-test-26000"), None);
        assert_eq!(
            variables("A=1\0B=x=y\0"),
            Some([("A", "1"), ("B", "x=y")].map(|(k, v)| (k.to_owned(), v.to_owned())).into())
        );
        for cut in ["", "A=1\0B=x=", "A=1\0B"] {
            assert_eq!(variables(cut), None, "{cut:?}");
        }
    }
}
