//! How a container gets the guard: a library that has the name of CUDA's driver library, and that needs the real one by its absolute path.
//!
//! Only the file behind the name changes. The links to it, such as `libcuda.so.1`, are made in the container as without the guard.

use super::{Edits, Mount, Spec};

/// What [`Edits::shadow`] puts into a container.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Shadow {
    /// The guard's file on the node.
    pub library: String,
    /// Where the container has the real library.
    pub real: String,
    /// Files that the container can only read: the path on the node, and the path in the container.
    pub read_only: Vec<(String, String)>,
    /// Files that the container can also write.
    pub writable: Vec<(String, String)>,
}

impl Edits {
    /// Put the guard in the place of CUDA's driver library. Return false, and change nothing, if no mount has that library.
    pub fn shadow(&mut self, shadow: &Shadow) -> bool {
        let Some(real) = self.mounts.iter().find(|mount| is_cuda(mount)) else {
            return false;
        };
        let real = Mount {
            container_path: shadow.real.clone(),
            ..real.clone()
        };
        // A node may provide the library in several directories. All of them are the same driver, so one real library is enough.
        for mount in self.mounts.iter_mut().filter(|mount| is_cuda(mount)) {
            mount.host_path.clone_from(&shadow.library);
        }
        self.mounts.push(real);
        let files = |files: &[(String, String)], options: &[&str]| -> Vec<Mount> {
            let mount = |(host, container): &(String, String)| Mount {
                host_path: host.clone(),
                container_path: container.clone(),
                options: options.iter().map(|option| (*option).to_owned()).collect(),
                ..Mount::default()
            };
            files.iter().map(mount).collect()
        };
        self.mounts
            .extend(files(&shadow.read_only, &["ro", "nosuid", "nodev", "noexec", "bind"]));
        self.mounts
            .extend(files(&shadow.writable, &["rw", "nosuid", "nodev", "noexec", "bind"]));
        true
    }
}

impl Spec {
    /// Report whether a container with this device gets CUDA's driver library from a mount.
    pub fn mounts_cuda(&self, device: &str) -> bool {
        self.edits_of(device).is_some_and(|edits| edits.mounts.iter().any(is_cuda))
    }
}

/// Report whether a mount has CUDA's driver library for 64-bit programs. There is no guard for 32-bit programs.
fn is_cuda(mount: &Mount) -> bool {
    let mut parts = mount.container_path.rsplit('/');
    let name = parts.next().unwrap_or_default();
    let is_library = name == "libcuda.so" || name.starts_with("libcuda.so.");
    is_library && !parts.any(|directory| matches!(directory, "i386-linux-gnu" | "i686-linux-gnu" | "lib32"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn edits(paths: &[&str]) -> Edits {
        let mount = |path: &&str| Mount {
            host_path: format!("/drv{path}"),
            container_path: (*path).to_owned(),
            options: vec!["ro".to_owned()],
            ..Mount::default()
        };
        Edits {
            mounts: paths.iter().map(mount).collect(),
            ..Edits::default()
        }
    }

    fn pair(host: &str, container: &str) -> (String, String) {
        (host.to_owned(), container.to_owned())
    }

    #[test]
    fn only_the_file_behind_the_name_of_cudas_library_changes() {
        let mut edits = edits(&[
            "/usr/lib64/libcuda.so.550.54.15",
            "/usr/lib64/libcudadebugger.so.550.54.15",
            "/usr/lib/i386-linux-gnu/libcuda.so.550.54.15",
            "/usr/lib64/libnvidia-ml.so.550.54.15",
        ]);
        let shadow = Shadow {
            library: "/state/guard/1/libcuda.so.1".to_owned(),
            real: "/run/divvy/guard/libcuda.so.real".to_owned(),
            read_only: vec![pair("/state/limits", "/run/limits")],
            writable: vec![pair("/state/usage", "/run/usage")],
        };
        assert!(edits.shadow(&shadow));
        let mounts = edits.mounts.iter();
        let lines = mounts.map(|mount| format!("{} -> {} {}", mount.host_path, mount.container_path, mount.options.join(",")));
        insta::assert_snapshot!(lines.collect::<Vec<_>>().join("\n"), @"
        /state/guard/1/libcuda.so.1 -> /usr/lib64/libcuda.so.550.54.15 ro
        /drv/usr/lib64/libcudadebugger.so.550.54.15 -> /usr/lib64/libcudadebugger.so.550.54.15 ro
        /drv/usr/lib/i386-linux-gnu/libcuda.so.550.54.15 -> /usr/lib/i386-linux-gnu/libcuda.so.550.54.15 ro
        /drv/usr/lib64/libnvidia-ml.so.550.54.15 -> /usr/lib64/libnvidia-ml.so.550.54.15 ro
        /drv/usr/lib64/libcuda.so.550.54.15 -> /run/divvy/guard/libcuda.so.real ro
        /state/limits -> /run/limits ro,nosuid,nodev,noexec,bind
        /state/usage -> /run/usage rw,nosuid,nodev,noexec,bind
        ");
    }

    #[test]
    fn a_container_without_cudas_library_is_left_as_it_is() {
        for paths in [&[][..], &["/usr/lib64/libcudart.so.12", "/usr/lib64/libcuda.sox"]] {
            let mut edits = edits(paths);
            let before = edits.clone();
            assert!(!edits.shadow(&Shadow::default()));
            assert_eq!(edits, before);
        }
    }
}
