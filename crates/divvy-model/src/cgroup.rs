//! The names that a kubelet gives to the cgroups of pods.
//!
//! With the cgroupfs driver, a container's path is `kubepods/burstable/pod<uid>/<container id>`. With the systemd driver, it is
//! `kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid with _ for ->.slice/cri-containerd-<id>.scope` (kubelet,
//! `pkg/kubelet/cm/cgroup_manager_linux.go`). The kubelet's `cgroupRoot` may precede either path.

/// Report whether a directory has the name of the cgroup that contains all pods: `kubepods`, `kubepods.slice`, or
/// `kubelet-kubepods.slice`.
pub fn is_kubepods(name: &str) -> bool {
    name.strip_suffix(".slice").unwrap_or(name).ends_with("kubepods")
}

/// Return the UID in the name of a pod's cgroup, or `None` for any other name. The result is meaningful only for a directory
/// below one for which [`is_kubepods`] is true. Elsewhere, the same name may mean something else.
pub fn pod_uid(name: &str) -> Option<String> {
    let plain = |uid: &str| !uid.is_empty() && uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    if let Some(slice) = name.strip_suffix(".slice") {
        let (_, uid) = slice.rsplit_once("-pod")?;
        return (plain(uid) && !uid.contains('-')).then(|| uid.replace('_', "-"));
    }
    let uid = name.strip_prefix("pod")?;
    plain(uid).then(|| uid.to_owned())
}

/// Report whether a cgroup v2 or any of its descendants contains processes. The argument is the text of `cgroup.events`. `None`
/// if the text does not say.
pub fn is_populated(cgroup_events: &str) -> Option<bool> {
    let value = cgroup_events.lines().find_map(|line| line.strip_prefix("populated "))?;
    match value.trim() {
        "0" => Some(false),
        "1" => Some(true),
        _ => None,
    }
}

/// Report whether a cgroup v1 or any of its descendants contains processes. The argument is the text of `pids.current`. `None` if
/// the text is not a number.
pub fn has_processes(pids_current: &str) -> Option<bool> {
    let count = pids_current.trim().parse::<u64>();
    count.ok().map(|count| count > 0)
}

/// Where a process runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CgroupOwner {
    /// The UID of the pod.
    pub pod: String,
    /// The container runtime's ID of the container. `None` if the process is in the pod's own cgroup, or if the name of the cgroup is unknown.
    pub container: Option<String>,
}

/// Return the pod and the container to which a process belongs. The argument is the text of `/proc/<pid>/cgroup`. `None` if the
/// process belongs to no pod.
///
/// With cgroup v2, the text has one line, `0::<path>`; with v1, it has one line per controller. If the reader is in its own
/// cgroup namespace, the path is relative to the reader's cgroup: it starts with `/..` and may omit `kubepods`.
pub fn owner_of_process(proc_cgroup: &str) -> Option<CgroupOwner> {
    let paths = proc_cgroup.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.filter_map(owner_of_path).next()
}

fn owner_of_path(path: &str) -> Option<CgroupOwner> {
    let mut below_kubepods = path.starts_with("/..");
    let mut names = path.split('/');
    while let Some(name) = names.next() {
        if let Some(pod) = pod_uid(name).filter(|_| below_kubepods) {
            let container = names.next().and_then(container_id);
            return Some(CgroupOwner { pod, container });
        }
        below_kubepods |= is_kubepods(name);
    }
    None
}

/// Report whether a directory in a pod's cgroup has the name of a container's. The name of the pod's sandbox looks the same. The name of CRI-O's monitor,
/// `crio-conmon-<id>.scope`, is not accepted.
pub fn is_container(name: &str) -> bool {
    container_id(name).is_some() && !name.starts_with("crio-conmon-") && pod_uid(name).is_none()
}

/// Return the ID in the name of a container's cgroup: `<id>`, `cri-containerd-<id>.scope`, `crio-<id>.scope`, or `docker-<id>.scope`.
fn container_id(name: &str) -> Option<String> {
    let id = match name.strip_suffix(".scope") {
        Some(scope) => scope.rsplit_once('-').map_or(scope, |(_, id)| id),
        None => name,
    };
    let is_id = (1..=96).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    is_id.then(|| id.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_lives_in_a_cgroup_is_known_or_nothing_is() {
        for (events, current, expected) in [
            ("populated 1\nfrozen 0\n", "2\n", Some(true)),
            ("frozen 0\npopulated 0\n", "0\n", Some(false)),
            ("populated 2\n", "-1\n", None),
            ("unpopulated 1\n", "1 2\n", None),
            ("", "", None),
        ] {
            assert_eq!(
                (is_populated(events), has_processes(current)),
                (expected, expected),
                "{events}{current}"
            );
        }
    }

    #[test]
    fn a_containers_cgroup_has_the_name_that_a_runtime_gives_it() {
        let id = "0f".repeat(32);
        for name in [
            id.clone(),
            format!("cri-containerd-{id}.scope"),
            format!("crio-{id}.scope"),
            format!("docker-{id}.scope"),
        ] {
            assert!(is_container(&name), "{name}");
        }
        for name in [
            "".to_owned(),
            "..".to_owned(),
            "cgroup.procs".to_owned(),
            "a b".to_owned(),
            "init.scope.d".to_owned(),
            "podaaaa1".to_owned(),
            "kubepods-pod0a.slice".to_owned(),
            format!("crio-conmon-{id}.scope"),
            format!("cri-containerd-{id}.service"),
            id.repeat(2),
        ] {
            assert!(!is_container(&name), "{name}");
        }
    }

    #[test]
    fn a_cgroup_path_tells_the_pod_and_container() {
        for (text, expected) in [
            (
                "0::/kubepods/burstable/podaaaa-1/0123abcd\n",
                Some(("aaaa-1", Some("0123abcd"))),
            ),
            ("0::/kubepods/podaaaa-1/0123abcd\n", Some(("aaaa-1", Some("0123abcd")))),
            (
                "0::/test-n1/kubepods/besteffort/podaaaa-1/0123abcd/init.scope\n",
                Some(("aaaa-1", Some("0123abcd"))),
            ),
            (
                "0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0a_1b_2c.slice/cri-containerd-01ab.scope\n",
                Some(("0a-1b-2c", Some("01ab"))),
            ),
            (
                "0::/kubepods.slice/kubepods-pod0a_1b_2c.slice/crio-01ab.scope/container\n",
                Some(("0a-1b-2c", Some("01ab"))),
            ),
            ("0::/../../podaaaa-1/0123abcd\n", Some(("aaaa-1", Some("0123abcd")))),
            (
                "0::/../../kubepods-besteffort-pod0a_1b.slice/cri-containerd-01ab.scope\n",
                Some(("0a-1b", Some("01ab"))),
            ),
            (
                "12:pids:/kubepods/burstable/podaaaa-1/01ab\n3:name=systemd:/kubepods/burstable/podaaaa-1/01ab\n0::/\n",
                Some(("aaaa-1", Some("01ab"))),
            ),
            ("0::/kubepods/podaaaa-1\n", Some(("aaaa-1", None))),
            ("0::/kubepods/podaaaa-1/a b\n", Some(("aaaa-1", None))),
            ("0::/kubepods/podaaaa-1//01ab\n", Some(("aaaa-1", None))),
            ("0::/system.slice/podman.service\n", None),
            ("0::/user.slice/user-1000.slice/pod1\n", None),
            ("0::/\n", None),
            ("garbage", None),
            ("", None),
        ] {
            let owner = owner_of_process(text);
            let found = owner.as_ref().map(|owner| (owner.pod.as_str(), owner.container.as_deref()));
            assert_eq!(found, expected, "{text}");
        }
    }
}
