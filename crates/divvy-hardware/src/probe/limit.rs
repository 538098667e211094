//! Where the limit of a pod's GPU memory is set: the pod's cgroup, and those of its containers.

use std::fs;
use std::path::{Component, Path};

use divvy_model::cgroup::{is_container, pod_uid};

use super::log;
use crate::backend::{Cgroup, PodOf};
use crate::protocol::LimitRequest;
use crate::{Failure, FailureCode};

/// The kernel's controller of device memory (Linux 6.14 and later).
const CONTROLLER: &str = "dmem";

/// Return the cgroup of a pod, or of a container directly below it.
///
/// # Errors
/// The path is neither, or a directory does not exist.
pub(super) fn cgroup(root: &Path, wanted: &LimitRequest) -> Result<Cgroup, Failure> {
    let path = &wanted.cgroup;
    let refuse = |why: &str| Err(Failure::new(FailureCode::Protocol, format!("{path:?} {why}")));
    let mut names = Vec::new();
    for part in Path::new(path).components() {
        match part {
            Component::Normal(name) => names.push(name.to_str().unwrap_or_default()),
            _ => return refuse("is not a path below the root of the cgroups"),
        }
    }
    // What is below a container is the container's own affair.
    let in_pod = match names.iter().position(|name| pod_uid(name).is_some()) {
        Some(pod) => &names[pod + 1..],
        None => return refuse("is not the cgroup of a pod or of a container"),
    };
    let directory = root.join(path);
    let pod = match in_pod {
        [] => None,
        [name] if is_container(name) => directory.parent().map(Path::to_owned),
        _ => return refuse("is not the cgroup of a pod or of a container"),
    };
    for directory in pod.iter().chain([&directory]) {
        match fs::symlink_metadata(directory) {
            Ok(data) if data.is_dir() => {}
            Ok(_) => return refuse("is not a directory"),
            Err(error) => {
                return Err(Failure::new(
                    FailureCode::Unknown,
                    format!("{}: {error}", directory.display()),
                ));
            }
        }
    }
    let alone = wanted.alone;
    let pod = pod.map(|directory| PodOf { directory, alone });
    Ok(Cgroup { directory, pod })
}

/// Give a cgroup the files of the controller of device memory, if the kernel has it: each cgroup above must pass it on. Neither the kubelet nor
/// a container runtime does this. What cannot be done is logged, and the driver says whether it can do without.
pub(super) fn enable(root: &Path, directory: &Path) {
    let mut above: Vec<&Path> = directory
        .ancestors()
        .skip(1)
        .take_while(|path| path.starts_with(root))
        .collect();
    above.reverse();
    for cgroup in above {
        let has = |file: &str| {
            let text = fs::read_to_string(cgroup.join(file)).unwrap_or_default();
            text.split_whitespace().any(|name| name == CONTROLLER)
        };
        let control = "cgroup.subtree_control";
        if !has("cgroup.controllers") {
            return;
        }
        if has(control) {
            continue;
        }
        let control = cgroup.join(control);
        if let Err(error) = fs::write(&control, format!("+{CONTROLLER}")) {
            log(format_args!(
                "cannot enable the controller {CONTROLLER} in {}: {error}",
                control.display()
            ));
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn limit(path: &str) -> LimitRequest {
        LimitRequest {
            uuid: "GPU-a".to_owned(),
            cgroup: path.to_owned(),
            hard: divvy_model::MiB(1),
            alone: true,
        }
    }

    #[test]
    fn only_the_cgroups_of_pods_and_their_containers_are_limited() {
        let root = tempfile::tempdir().expect("a directory");
        let pod = "kubepods/besteffort/pod6b8e5a3c-0000-4000-8000-000000000001";
        let slice = "kubepods.slice/kubepods-pod6b8e5a3c_0000_4000_8000_000000000002.slice";
        let (id, scope) = ("0f".repeat(32), format!("cri-containerd-{}.scope", "0f".repeat(32)));
        let at = |pod: &str, below: &str| format!("{pod}/{below}");
        for path in [
            &at(pod, &id),
            &at(pod, &format!("{id}/nested")),
            &at(pod, &format!("{id}/pod7")),
            &at(pod, "pod7"),
            &at(pod, "pod7/0f"),
            &at(slice, &scope),
            &at(slice, "crio-0f.scope/container"),
            &at(slice, "crio-conmon-0f.scope"),
            "system.slice/cri-containerd-0f.scope",
        ] {
            fs::create_dir_all(root.path().join(path)).expect("created");
        }
        let link = |to: &str, from: &str| symlink(root.path().join(to), root.path().join(from)).expect("linked");
        link("system.slice", "kubepods/podlink");
        link("system.slice", &at(pod, "0e"));
        for path in [pod, slice] {
            let directory = root.path().join(path);
            assert_eq!(cgroup(root.path(), &limit(path)), Ok(Cgroup { directory, pod: None }));
        }
        for (pod, container) in [(pod, &*id), (slice, &*scope), (slice, "crio-0f.scope")] {
            let found = cgroup(root.path(), &limit(&at(pod, container)));
            let directory = root.path().join(pod);
            let expected = Cgroup {
                directory: directory.join(container),
                pod: Some(PodOf { directory, alone: true }),
            };
            assert_eq!(found, Ok(expected));
        }
        let neither = "is not the cgroup of a pod or of a container";
        for (path, part) in [
            ("", neither),
            ("system.slice", neither),
            ("system.slice/cri-containerd-0f.scope", neither),
            ("kubepods", neither),
            (&*at(pod, &format!("{id}/nested")), neither),
            (&*at(pod, &format!("{id}/pod7")), neither),
            (&*at(pod, "pod7"), neither),
            (&*at(pod, "pod7/0f"), neither),
            (&*at(slice, "crio-0f.scope/container"), neither),
            (&*at(slice, "crio-conmon-0f.scope"), neither),
            (&*at(pod, "cgroup.procs"), neither),
            ("kubepods/podlink", "is not a directory"),
            ("kubepods/podlink/cri-containerd-0f.scope", "is not a directory"),
            (&*at(pod, "0e"), "is not a directory"),
            (&*at(pod, "0d"), "No such file"),
            ("kubepods/pod-gone", "No such file"),
            ("../etc/pod1", "is not a path below"),
            ("/kubepods/pod1", "is not a path below"),
            (&*at(pod, "../pod1"), "is not a path below"),
        ] {
            let refused = cgroup(root.path(), &limit(path)).expect_err(path);
            assert!(refused.text.contains(part), "{path}: {refused}");
        }
    }

    #[test]
    fn each_cgroup_above_the_pods_passes_on_the_kernels_controller() {
        let root = tempfile::tempdir().expect("a directory");
        let at = |path: &str| root.path().join(path);
        let pod = at("kubepods/burstable/pod1");
        fs::create_dir_all(&pod).expect("created");
        let above = ["", "kubepods", "kubepods/burstable"];
        let write = |controllers: &str| {
            for path in above {
                fs::write(at(path).join("cgroup.controllers"), controllers).expect("written");
                fs::write(at(path).join("cgroup.subtree_control"), "cpu memory\n").expect("written");
            }
        };
        let written = || above.map(|path| fs::read_to_string(at(path).join("cgroup.subtree_control")).expect("read"));
        write("cpu memory\n");
        enable(root.path(), &pod);
        assert_eq!(written(), ["cpu memory\n"; 3]);
        write("cpu memory dmem\n");
        fs::write(at("cgroup.subtree_control"), "cpu dmem\n").expect("written");
        enable(root.path(), &pod);
        assert_eq!(written(), ["cpu dmem\n", "+dmem", "+dmem"]);
        assert!(
            !pod.join("cgroup.subtree_control").exists(),
            "containers share the pod's limit"
        );
        fs::write(pod.join("cgroup.controllers"), "cpu memory dmem\n").expect("written");
        enable(root.path(), &pod.join("0f"));
        let below = fs::read_to_string(pod.join("cgroup.subtree_control"));
        assert_eq!(below.expect("read"), "+dmem", "until one of them has its own");
    }
}
