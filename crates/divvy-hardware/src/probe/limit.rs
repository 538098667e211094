//! Where the limit of a pod's GPU memory is set: the pod's cgroup.

use std::fs;
use std::path::{Component, Path, PathBuf};

use divvy_model::cgroup::pod_uid;

use super::log;
use crate::{Code, Failure};

/// The kernel's controller of device memory (Linux 6.14 and later).
const CONTROLLER: &str = "dmem";

/// Return the directory of a pod's cgroup. `path` is relative to the root of the cgroups.
///
/// # Errors
/// The path is not that of a pod's cgroup, or the directory does not exist.
pub(super) fn directory(root: &Path, path: &str) -> Result<PathBuf, Failure> {
    let refuse = |why: &str| Err(Failure::new(Code::Protocol, format!("{path:?} {why}")));
    let relative = Path::new(path);
    if !relative.components().all(|part| matches!(part, Component::Normal(_))) {
        return refuse("is not a path below the root of the cgroups");
    }
    if relative.file_name().and_then(|name| pod_uid(name.to_str()?)).is_none() {
        return refuse("is not the cgroup of a pod");
    }
    let directory = root.join(relative);
    match fs::symlink_metadata(&directory) {
        Ok(data) if data.is_dir() => Ok(directory),
        Ok(_) => refuse("is not a directory"),
        Err(error) => Err(Failure::new(Code::Unknown, format!("{}: {error}", directory.display()))),
    }
}

/// Give a cgroup the files of the controller of device memory, if the kernel has it: each cgroup above must pass it on. The kubelet
/// does not do this. What cannot be done is logged, and the driver says whether it can do without.
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

    #[test]
    fn only_the_cgroup_of_a_pod_is_limited() {
        let root = tempfile::tempdir().expect("a directory");
        let pod = "kubepods/besteffort/pod6b8e5a3c-0000-4000-8000-000000000001";
        let slice = "kubepods.slice/kubepods-pod6b8e5a3c_0000_4000_8000_000000000002.slice";
        for path in [pod, slice, "system.slice"] {
            fs::create_dir_all(root.path().join(path)).expect("created");
        }
        symlink(root.path().join("system.slice"), root.path().join("kubepods/podlink")).expect("linked");
        for path in [pod, slice] {
            assert_eq!(directory(root.path(), path), Ok(root.path().join(path)));
        }
        for (path, part) in [
            ("", "is not the cgroup of a pod"),
            ("system.slice", "is not the cgroup of a pod"),
            ("kubepods", "is not the cgroup of a pod"),
            ("kubepods/podlink", "is not a directory"),
            ("kubepods/pod-gone", "No such file"),
            ("../etc/pod1", "is not a path below"),
            ("/kubepods/pod1", "is not a path below"),
        ] {
            let refused = directory(root.path(), path).expect_err(path);
            assert!(refused.text.contains(part), "{path}: {refused}");
        }
    }

    #[test]
    fn each_cgroup_above_the_pods_passes_the_controller_on_if_the_kernel_has_it() {
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
    }
}
