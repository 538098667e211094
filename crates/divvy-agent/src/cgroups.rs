//! Which pods have processes, according to the host's cgroups. No other source survives a forced deletion of the pod.
//!
//! A pod's cgroup carries the pod's UID ([`divvy_model::cgroup`]). On cgroup v2, `cgroup.events` says whether the cgroup or one below it
//! has processes. On v1, `pids.current` of the pids controller counts them. Lists of PIDs are useless across PID namespaces. The pod's
//! sandbox counts as well: while it exists, the kubelet may start containers in it. A kubelet with `cgroupsPerQOS: false` makes neither a
//! `kubepods` cgroup nor cgroups for pods; Divvy needs them.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};

use divvy_model::cgroup;
use tracing::warn;

use crate::files;

/// The root of the cgroups, below the machine's root.
pub(crate) const ROOT: &str = "sys/fs/cgroup";
/// How many directory levels above `kubepods` are searched: the kubelet's `cgroupRoot` is usually the root.
const ABOVE_KUBEPODS: usize = 3;

/// Why nothing is known about the cgroups of pods.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CgroupError {
    /// The machine's cgroups are not there.
    #[error("{} does not exist, so the agent cannot tell which containers still run; mount the host's cgroups (read-only) for the agent", .0.display())]
    Absent(PathBuf),
    /// A directory cannot be read.
    #[error("cannot list {path}: {1}", path = .0.display())]
    List(PathBuf, #[source] io::Error),
    /// A pod is not among those that have one.
    #[error("the pod has no cgroup below {}", .0.display())]
    OfPod(PathBuf),
}

/// Return the UIDs of the pods whose cgroups have processes. Return `None` if there is no `kubepods` cgroup, which the kubelet
/// creates when it starts.
///
/// A pod's cgroup that cannot be read counts as populated and is logged: keeping memory too long does less harm than granting it
/// twice. An empty set is normal for a node without pods.
///
/// # Errors
/// The root has no cgroup file system, or it cannot be listed. Then nothing is known about any pod.
pub(crate) fn populated_pods(sys_root: &Path) -> Result<Option<BTreeSet<String>>, CgroupError> {
    let base = sys_root.join(ROOT);
    let mut populated = None;
    if !base.is_dir() {
        return Err(CgroupError::Absent(base));
    }
    let is_v2 = is_v2(sys_root);
    // On v1, the base has one tree per controller, and only the tree of the pids controller counts processes.
    let roots = if is_v2 || !base.join("pids").is_dir() {
        vec![base]
    } else {
        vec![base.join("pids"), base.join("unified")]
    };
    for root in roots {
        let found = walk(&root, ABOVE_KUBEPODS, false, &mut |cgroup| {
            let populated: &mut BTreeSet<String> = populated.get_or_insert_default();
            if let KubeletCgroup::Pod(uid, path) = cgroup
                && !populated.contains(&uid)
                && is_populated(path)
            {
                populated.insert(uid);
            }
        });
        found.map_err(|error| CgroupError::List(root, error))?;
    }
    Ok(populated)
}

/// Report whether the node's pods are in cgroups of version 2.
pub(crate) fn is_v2(sys_root: &Path) -> bool {
    sys_root.join("sys/fs/cgroup/cgroup.controllers").exists()
}

/// Return the path of a pod's cgroup of version 2, relative to the root of the cgroups.
///
/// # Errors
/// The pod has none.
pub(crate) fn pod_cgroup(sys_root: &Path, uid: &str) -> Result<String, CgroupError> {
    let cgroup = pod_cgroups(sys_root)?.remove(uid);
    cgroup.ok_or_else(|| CgroupError::OfPod(sys_root.join(ROOT)))
}

/// Return the paths of the pods' cgroups of version 2, relative to the root of the cgroups, by the pods' UIDs.
///
/// # Errors
/// The root cannot be listed.
pub(crate) fn pod_cgroups(sys_root: &Path) -> Result<BTreeMap<String, String>, CgroupError> {
    let base = sys_root.join(ROOT);
    let mut found = BTreeMap::new();
    walk(&base, ABOVE_KUBEPODS, false, &mut |cgroup| {
        if let KubeletCgroup::Pod(uid, path) = cgroup
            && let Some(relative) = path.strip_prefix(&base).ok().and_then(Path::to_str)
        {
            found.insert(uid, relative.to_owned());
        }
    })
    .map_err(|error| CgroupError::List(base, error))?;
    Ok(found)
}

/// A cgroup that the kubelet has created.
enum KubeletCgroup<'p> {
    /// `kubepods`.
    Kubepods,
    /// That of the pod with this UID, and its directory.
    Pod(String, &'p Path),
}

/// Search a directory and `levels` more levels below it. `inside` is true below `kubepods`.
fn walk(directory: &Path, levels: usize, inside: bool, found: &mut dyn FnMut(KubeletCgroup<'_>)) -> io::Result<()> {
    let entries = match std::fs::read_dir(directory) {
        Ok(entries) => entries,
        Err(error) if is_gone(&error) => return Ok(()),
        Err(error) => return Err(error),
    };
    for entry in entries {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) if is_gone(&error) => return Ok(()),
            Err(error) => return Err(error),
        };
        let Ok(name) = entry.file_name().into_string() else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        match cgroup::pod_uid(&name) {
            Some(uid) if inside => found(KubeletCgroup::Pod(uid, &entry.path())),
            _ if !inside && cgroup::is_kubepods(&name) => {
                found(KubeletCgroup::Kubepods);
                walk(&entry.path(), 1, true, found)?;
            }
            _ if levels > 0 && !is_foreign(&name) => walk(&entry.path(), levels - 1, inside, found)?,
            _ => {}
        }
    }
    Ok(())
}

/// Report whether this is a cgroup that systemd creates for something other than pods. Some hosts have hundreds of these.
fn is_foreign(name: &str) -> bool {
    matches!(name, "system.slice" | "user.slice")
        || [".service", ".scope", ".mount", ".socket", ".swap"]
            .iter()
            .any(|ending| name.ends_with(ending))
}

fn is_populated(pod: &Path) -> bool {
    match try_populated(pod) {
        Ok(populated) => populated,
        Err((path, error)) => {
            warn!(path = %path.display(), %error, "cannot tell whether this pod still has processes; it counts as running");
            true
        }
    }
}

fn try_populated(pod: &Path) -> Result<bool, (PathBuf, io::Error)> {
    let events = pod.join("cgroup.events");
    match files::read_kernel(&events) {
        Ok(text) => {
            return cgroup::is_populated(&text).ok_or_else(|| {
                let what = "no line \"populated 0\" or \"populated 1\"";
                (events, io::Error::new(io::ErrorKind::InvalidData, what))
            });
        }
        Err(error) if is_gone(&error) => {}
        Err(error) => return Err((events, error)),
    }
    let current = pod.join("pids.current");
    match files::read_kernel(&current) {
        Ok(text) => {
            cgroup::has_processes(&text).ok_or_else(|| (current, io::Error::new(io::ErrorKind::InvalidData, "not a number")))
        }
        // The whole cgroup may have disappeared meanwhile. If it still exists, a controller is missing and the state is unknown.
        Err(error) if is_gone(&error) && !pod.exists() => Ok(false),
        Err(error) => Err((current, error)),
    }
}

/// Report whether the file is gone. Reading a cgroup while it is being removed fails with ENODEV.
fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let root = tempfile::tempdir().expect("temp dir");
        let base = root.path().join("sys/fs/cgroup");
        std::fs::create_dir_all(&base).expect("made");
        for (path, text) in files {
            let path = base.join(path);
            std::fs::create_dir_all(path.parent().expect("has one")).expect("made");
            std::fs::write(path, text).expect("written");
        }
        root
    }

    fn check(files: &[(&str, &str)], expected: &[&str]) {
        let root = tree(files);
        let found = populated_pods(root.path()).expect("readable").unwrap_or_default();
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected, "{files:?}");
    }

    #[test]
    fn a_pod_lives_while_its_cgroup_has_processes() {
        check(&[], &[]);
        check(
            &[
                ("kubepods/burstable/podaaaa-1/cgroup.events", "populated 1\nfrozen 0\n"),
                ("kubepods/besteffort/podaaaa-2/cgroup.events", "populated 0\nfrozen 0\n"),
                ("kubepods/podaaaa-3/cgroup.events", "frozen 0\npopulated 1\n"),
            ],
            &["aaaa-1", "aaaa-3"],
        );
    }

    #[test]
    fn systemd_writes_the_uid_with_underscores() {
        check(
            &[
                (
                    "kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a_1b_2c.slice/cgroup.events",
                    "populated 1\n",
                ),
                ("kubepods.slice/kubepods-podff.slice/cgroup.events", "populated 1\n"),
                (
                    "kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod7_7.slice/cgroup.events",
                    "populated 1\n",
                ),
            ],
            &["0a-1b-2c", "7-7", "ff"],
        );
    }

    #[test]
    fn a_kubelet_may_have_a_cgroup_root_of_its_own() {
        check(
            &[("test-n1/kubepods/burstable/poda-1/cgroup.events", "populated 1\n")],
            &["a-1"],
        );
        check(&[("pids/test-n1/kubepods/burstable/poda-1/pids.current", "1\n")], &["a-1"]);
    }

    #[test]
    fn on_version_1_the_pids_controller_counts() {
        check(
            &[
                ("pids/kubepods/burstable/poda-1/pids.current", "2\n"),
                ("pids/kubepods/poda-2/pids.current", "0\n"),
                ("memory/kubepods/poda-2/memory.usage_in_bytes", "1\n"),
            ],
            &["a-1"],
        );
    }

    #[test]
    fn what_cannot_be_read_counts_as_running() {
        check(
            &[
                ("kubepods/poda-1/cgroup.events", "garbage"),
                ("kubepods/poda-2/pids.current", "many"),
                ("kubepods/poda-3/cpu.stat", "neither of the two files"),
            ],
            &["a-1", "a-2", "a-3"],
        );
    }

    #[test]
    fn without_cgroups_nothing_is_known() {
        let root = tempfile::tempdir().expect("temp dir");
        let text = populated_pods(root.path()).expect_err("no cgroups").to_string();
        assert!(text.contains("sys/fs/cgroup"), "{text}");
    }

    #[test]
    fn missing_cgroups_for_pods_differ_from_missing_pods() {
        let found = |files: &[(&str, &str)]| populated_pods(tree(files).path()).expect("readable");
        assert_eq!(found(&[]), None);
        assert_eq!(
            found(&[("system.slice/cri-containerd-0f.scope/cgroup.events", "populated 1\n")]),
            None
        );
        for none in [
            "kubepods/besteffort/cgroup.events",
            "kubepods.slice/cgroup.events",
            "pids/kubepods/pids.current",
            "kubelet.slice/kubelet-kubepods.slice/cgroup.events",
        ] {
            assert_eq!(found(&[(none, "")]), Some(BTreeSet::new()), "{none}");
        }
    }

    #[test]
    fn other_cgroups_are_not_taken_for_pods() {
        check(
            &[
                ("system.slice/podman.service/cgroup.events", "populated 1\n"),
                ("kubepods/podman.scope/cgroup.events", "populated 1\n"),
                ("user.slice/kubepods/poda/cgroup.events", "populated 1\n"),
                ("elsewhere/poda/cgroup.events", "populated 1\n"),
            ],
            &[],
        );
    }
}
